import math

import numpy as np
import pytest

from contadj.orders import QUANTITIES, expected_order, observed_order, round_off_floor
from contadj.tableaus import TABLEAUS

H = [2.0**-k for k in range(3, 9)]
NO_FLOOR = [0.0] * len(H)


@pytest.mark.parametrize("method", TABLEAUS)
@pytest.mark.parametrize("quantity", ["discrete", "continuous", "adjoint"])
def test_gradients_of_every_runge_kutta_method_have_the_order_of_the_method(method, quantity):
    assert expected_order(method, quantity).order == TABLEAUS[method].order


# Stated by hand: this is the list the study is judged by.
GAPS = {
    "euler": 1, "midpoint": 2, "heun2": 3, "ralston": 2, "heun3": 3, "bosh3": 3, "rk4": 4,
    "rk4_classic": 4, "tsit5": 5, "dopri5": 5, "dopri8": 8, "implicit_euler": 1,
    "implicit_midpoint": math.inf, "trapezoid": 2, "sdirk2": 2, "trbdf2": 2, "radauIIA3": 3,
    "radauIIA5": 5, "gl4": math.inf, "gl6": math.inf, "reversible_heun": 4,
}  # fmt: skip


@pytest.mark.parametrize(("method", "order"), GAPS.items())
def test_the_gap_closes_at_the_stated_order(method, order):
    assert expected_order(method, "gap").order == order


def test_every_tableau_has_a_stated_gap():
    assert set(TABLEAUS) <= set(GAPS)


def test_the_adjoint_of_leapfrog_is_stated_not_to_converge():
    assert expected_order("leapfrog", "adjoint").order == 0
    assert expected_order("leapfrog", "discrete").order == 2


@pytest.mark.parametrize("method", TABLEAUS)
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_every_expected_order_has_a_source_and_the_stated_tolerance(method, quantity):
    expected = expected_order(method, quantity)
    assert len(expected.source) > 20
    if not expected.exact:
        assert expected.tolerance == (0.15 if TABLEAUS[method].order < 5 else 0.4)


def test_nothing_is_stated_about_an_unknown_method():
    assert expected_order("my_method", "gap") is None


def test_an_unknown_quantity_is_refused():
    with pytest.raises(ValueError, match=r"`quantity` must be one of discrete.*got 'speed'"):
        expected_order("rk4", "speed")


def test_the_order_is_that_of_the_finest_pair_not_of_a_fit():
    # 1 + 100 h: the order of h^2 (1 + 100 h) falls from 2.90 to 2.36; a fit would say 2.7.
    errors = [h**2 * (1 + 100 * h) for h in H]
    result = observed_order(H, errors, NO_FLOOR, None)
    by_hand = math.log2(errors[-2] / errors[-1])
    assert result.order == pytest.approx(by_hand, rel=1e-14)
    assert len(result.pairwise) == 5 and result.pairwise[0] == pytest.approx(
        2 + math.log2(13.5 / 7.25)
    )


def test_pairs_that_touch_round_off_are_shown_but_not_used():
    errors = [h**4 for h in H[:4]] + [1e-9, 1.1e-9]
    result = observed_order(H, errors, [2e-9] * 6, expected_order("rk4", "discrete"))
    assert result.usable == (True, True, True, False, False)
    assert result.order == pytest.approx(4) and result.state == "as expected"
    assert len(result.pairwise) == 5 and result.pairwise[-1] == pytest.approx(-0.1375, abs=1e-3)


def test_step_ratios_other_than_two_are_taken_as_they_are():
    h = [1.0, 0.3, 0.2]
    result = observed_order(h, [x**3 for x in h], [0] * 3, expected_order("bosh3", "discrete"))
    assert result.pairwise == pytest.approx((3, 3), rel=1e-12)


def judged(errors, method="heun2", quantity="discrete", floor=1e-13):
    return observed_order(H, errors, [floor] * len(H), expected_order(method, quantity))


@pytest.mark.parametrize(
    ("errors", "arguments", "state"),
    [
        ([h**2 for h in H], {}, "as expected"),
        ([h**2.14 for h in H], {}, "as expected"),
        ([h**2.16 for h in H], {}, "deviates"),
        ([h**1.84 for h in H], {}, "deviates"),
        ([h**3 for h in H], {}, "deviates"),
        ([h**5.39 for h in H], {"method": "dopri5"}, "as expected"),
        ([h**5.41 for h in H], {"method": "dopri5"}, "deviates"),
        # Each halving of h halves the distance to 2.
        ([h**2 * math.exp(200 * h) for h in H], {}, "still changing"),
        # A leading term of order 2 under a larger one of order 3, hardly seen yet: 2.86, 2.76.
        ([h**2 + 1000 * h**3 for h in H], {}, "still changing"),
        # Towards 2 by 0.03 in the last step: settled elsewhere.
        ([8.0**-3 * 2 ** (-3.0 * k + 0.03 * max(k - 4, 0)) for k in range(6)], {}, "deviates"),
        ([1e-15] * 6, {}, "at round-off"),
        ([0.0] * 6, {}, "at round-off"),
        ([1e-2, 2.5e-3, 1e-14, 1e-14, 1e-14, 1e-14], {}, "not enough pairs"),
        ([1e-2, None, 1e-2, None, 1e-3, None], {}, "not enough pairs"),
        ([None] * 6, {}, "not enough pairs"),
        ([math.nan] * 6, {}, "not enough pairs"),
        ([1e-15] * 6, {"method": "gl4", "quantity": "gap"}, "at round-off"),
        ([h**4 for h in H], {"method": "gl4", "quantity": "gap"}, "deviates"),
        ([1e-15] * 5 + [1e-12], {"method": "gl4", "quantity": "gap"}, "deviates"),
        ([1.0 + h for h in H], {"method": "leapfrog", "quantity": "adjoint"}, "as expected"),
        ([h**2 for h in H], {"method": "my_method"}, "no statement"),
    ],
)
def test_the_state_says_how_the_order_stands(errors, arguments, state):
    result = judged(errors, **arguments)
    assert result.state == state
    assert bool(result.reason) == (state != "as expected")


def test_a_deviation_names_the_orders_it_is_about():
    assert judged([h**3 for h in H]).reason == "converges faster than 2: 3.00, 3.00"


def test_missing_errors_leave_the_other_pairs_as_they_are():
    errors = [None, *[h**2 for h in H[1:]]]
    result = judged(errors)
    assert math.isnan(result.pairwise[0]) and result.usable[0] is False
    assert result.state == "as expected"


@pytest.mark.parametrize(
    ("h", "errors", "message"),
    [
        ([0.1, 0.2], [1, 1], "`h` must decrease strictly"),
        ([0.1, 0.1], [1, 1], "`h` must decrease strictly"),
        ([0.2, 0.1], [1], "must have one length, got 2, 1 and 2"),
    ],
)
def test_bad_sequences_are_refused(h, errors, message):
    with pytest.raises(ValueError, match=message):
        observed_order(h, errors, [0] * 2, None)


def test_the_floor_grows_with_the_steps_and_follows_the_precision():
    assert round_off_floor("float64", 400) == pytest.approx(2 * round_off_floor("float64", 100))
    ratio = np.finfo("float32").eps / np.finfo("float64").eps
    assert round_off_floor("float32", 9) == pytest.approx(ratio * round_off_floor("float64", 9))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("steps", [16, 1024])
def test_the_rounding_of_a_recursion_stays_below_the_floor(dtype, steps):
    # y' = -0.8 y by Euler: the recursion in `dtype` against its value in extended precision.
    h = np.asarray(2 / steps, dtype)
    y = np.asarray(1.2, dtype)
    for _ in range(steps):
        y = y + h * (np.asarray(-0.8, dtype) * y)
    exact = np.longdouble(1.2) * (1 - np.longdouble(1.6) / steps) ** steps
    error = float(abs(y - exact) / exact)
    assert 0 < error < round_off_floor(dtype, steps)
