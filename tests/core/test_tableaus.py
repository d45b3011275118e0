"""Order conditions by rooted trees, generated here; the package has no code for them."""

from itertools import combinations_with_replacement
from math import prod

import numpy as np
import pytest

from contadj.tableaus import TABLEAUS, Tableau, get_tableau

ALL = list(TABLEAUS)
# Coefficients are rounded to 1e-16, sized up to 50 (dopri8's third-last row of a: 16.95), and up to
# eight of them are multiplied.
TOLERANCE = 2e-12
# An order condition that a method misses is a rational number of the size of 1/gamma; Prince and
# Dormand minimised theirs.
MISSED = 1e-7


def rooted_trees(order):
    """All rooted trees with `order` nodes, each a sorted tuple of its subtrees."""
    if order == 1:
        return [()]
    found = set()

    def choose(left, largest, chosen):
        if left == 0:
            found.add(tuple(sorted(chosen)))
        for size in range(min(left, largest), 0, -1):
            for count in range(1, left // size + 1):
                for group in combinations_with_replacement(rooted_trees(size), count):
                    choose(left - size * count, size - 1, chosen + list(group))

    choose(order - 1, order - 1, [])
    return sorted(found)


def size(tree):
    return 1 + sum(map(size, tree))


def density(tree):
    return size(tree) * prod(map(density, tree))


def stage_weights(tree, a, leaf):
    """The factor that multiplies b_i in the elementary weight of the tree."""
    value = np.ones(len(a))
    for child in tree:
        value = value * (leaf if child == () else a @ stage_weights(child, a, leaf))
    return value


def residuals(a, weights, leaf, order, x=1.0):
    return [
        weights @ stage_weights(tree, a, leaf) - x**order / density(tree)
        for tree in rooted_trees(order)
    ]


def worst(a, weights, leaf, order, x=1.0):
    return max(abs(r) for r in residuals(a, weights, leaf, order, x))


def test_rooted_trees_are_counted_as_in_the_literature():
    # Sloane's A000081.
    assert [len(rooted_trees(order)) for order in range(1, 10)] == [1, 1, 2, 4, 9, 20, 48, 115, 286]


@pytest.mark.parametrize("form", ["autonomous", "non-autonomous"])
@pytest.mark.parametrize("name", ALL)
def test_weights_satisfy_every_order_condition_up_to_the_stated_order(name, form):
    tableau = TABLEAUS[name]
    # f(t, y) sees c itself; the autonomous form sees the row sums of a.
    leaf = tableau.c if form == "non-autonomous" else tableau.a.sum(axis=1)
    for order in range(1, tableau.order + 1):
        assert worst(tableau.a, tableau.b, leaf, order) < TOLERANCE, order


@pytest.mark.parametrize("name", ALL)
def test_weights_miss_a_condition_of_the_next_order(name):
    tableau = TABLEAUS[name]
    assert worst(tableau.a, tableau.b, tableau.c, tableau.order + 1) > MISSED


@pytest.mark.parametrize("name", [n for n in ALL if TABLEAUS[n].embedded is not None])
def test_embedded_weights_have_exactly_the_stated_order(name):
    tableau = TABLEAUS[name]
    q = tableau.embedded_order
    for order in range(1, q + 1):
        assert worst(tableau.a, tableau.embedded, tableau.c, order) < TOLERANCE, order
    assert worst(tableau.a, tableau.embedded, tableau.c, q + 1) > MISSED


@pytest.mark.parametrize("name", [n for n in ALL if TABLEAUS[n].interpolant is not None])
def test_interpolants_satisfy_the_continuous_order_conditions_to_exactly_the_stated_order(name):
    tableau = TABLEAUS[name]
    q = tableau.interpolant_order
    misses = []
    for x in (0.1, 0.3, 0.5, 0.77, 1.0):
        weights = tableau.interpolant @ x ** np.arange(1, tableau.interpolant.shape[1] + 1)
        for order in range(1, q + 1):
            # dopri8's interpolant has coefficients up to 122 that nearly cancel.
            assert worst(tableau.a, weights, tableau.c, order, x) < 1e-11, (x, order)
        misses.append(worst(tableau.a, weights, tableau.c, q + 1, x))
    assert max(misses) > 1e-6


def test_the_symplectic_methods_are_the_gauss_methods():
    assert {n for n in ALL if TABLEAUS[n].symplectic} == {"implicit_midpoint", "gl4", "gl6"}


def test_the_symmetric_methods_are_gauss_and_trapezoid():
    expected = {"implicit_midpoint", "trapezoid", "gl4", "gl6"}
    assert {n for n in ALL if TABLEAUS[n].symmetric} == expected


def test_explicit_and_implicit_methods_are_told_apart():
    assert {n for n in ALL if TABLEAUS[n].explicit} == {
        "euler", "midpoint", "heun2", "heun3", "ralston", "rk4", "rk4_classic", "bosh3", "tsit5",
        "dopri5", "dopri8",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "evaluations"),
    [("euler", 1), ("heun2", 2), ("bosh3", 3), ("rk4", 4), ("dopri5", 6), ("tsit5", 6)]
    + [("dopri8", 13), ("trapezoid", 2), ("radauIIA5", 3)],
)
def test_evaluations_per_step_leave_out_the_stage_carried_over(name, evaluations):
    assert TABLEAUS[name].evaluations == evaluations


def test_rk4_is_the_three_eighths_rule_and_rk4_classic_the_textbook_method():
    np.testing.assert_array_equal(TABLEAUS["rk4"].b * 8, [1, 3, 3, 1])
    np.testing.assert_allclose(TABLEAUS["rk4_classic"].b * 6, [1, 2, 2, 1], rtol=1e-15)


def heun2(**changes):
    values = dict(name="mine", a=[[0, 0], [1, 0]], b=[0.5, 0.5], c=[0, 1], order=2, citation="")
    return Tableau(**(values | changes))


def test_a_wrong_node_breaks_the_non_autonomous_conditions_only():
    tableau = TABLEAUS["rk4_classic"]
    wrong = tableau.c.copy()
    wrong[1] += 0.1
    assert worst(tableau.a, tableau.b, tableau.a.sum(axis=1), 4) < TOLERANCE
    assert worst(tableau.a, tableau.b, wrong, 2) > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(c=[0, 0.9]), "row sums of `a` must equal the nodes `c`"),
        (dict(b=[0.5, 0.4]), "`b` must be 2 weights that sum to 1"),
        (dict(b=[1.0]), r"`b` must have shape \(2,\), got \(1,\)"),
        (dict(a=[[0, 0]]), r"`a` must have shape \(2, 2\), got \(1, 2\)"),
        (dict(order=0), "`order` must be at least 1, got 0"),
        (dict(embedded=[0.9, 0.2], embedded_order=1), "`embedded` must be 2 weights that sum to 1"),
        (dict(embedded=[1, 0]), "`embedded` and `embedded_order` must be given together"),
        (dict(interpolant=[[1], [0]], interpolant_order=1), "at x = 1 must reproduce `b`"),
        (dict(interpolant=[[0.5], [0.5]]), "`interpolant` and `interpolant_order`"),
    ],
    ids=["node", "weights", "length", "shape", "order", "embedded", "embedded order"]
    + ["interpolant", "interpolant order"],
)
def test_a_bad_tableau_is_refused(changes, message):
    assert heun2().order == 2
    with pytest.raises(ValueError, match=message):
        heun2(**changes)


def test_coefficients_cannot_be_changed():
    with pytest.raises(ValueError, match=r"read-only"):
        TABLEAUS["rk4"].b[0] = 0


@pytest.mark.parametrize("name", ["rk5", None, ["rk4"]])
def test_an_unknown_method_is_refused_with_the_list_of_those_there_are(name):
    with pytest.raises(ValueError, match=r"`method` must be one of euler, midpoint"):
        get_tableau(name)
