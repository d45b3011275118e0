"""The study of when the square commutes: its short steps, and what its small grid shows."""

from functools import cache

import numpy as np
import pytest

from contadj import backends
from contadj.config import load_study
from contadj.orders import observed_order
from contadj.results import CellRecord
from contadj.studies import _commute_jax, _commute_torch, commute

METHODS = ("euler", "heun2", "implicit_midpoint", "gl4")


@cache
def with_a_short_step(framework, method, n=8, s=0.5):
    module = {"torch": _commute_torch, "jax": _commute_jax}[framework]
    return module.gradients(backends.load_problem("driven", framework), method, 3 / (n + s), 8)


@pytest.mark.parametrize("method", METHODS)
def test_the_backends_agree_where_a_short_step_ends_the_solve(method):
    # In torch by `BacksolveAdjoint`, in JAX by the adjoint ODE written out on the two meshes.
    for one, other in zip(*(with_a_short_step(f, method) for f in ("torch", "jax")), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


def field(t, y, b=0.3, g=0.8, k=2.0):
    x, v = y
    return np.array([v, -b * v - k * np.sin(x) + g * np.cos(2 * t)])


def jacobian(y, b=0.3, k=2.0):
    return np.array([[0.0, 1.0], [-k * np.cos(y[0]), -b]])


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_short_step_lies_at_t1_going_forward_and_at_t0_going_backward(framework):
    h, n = 3 / 8.5, 8
    lengths = [h] * n + [0.5 * h]
    ys, t = [np.array([1.0, 0.5])], 0.0
    for length in lengths:
        ys.append(ys[-1] + length * field(t, ys[-1]))
        t += length
    end = np.array([2 * (ys[-1][0] - 0.2), ys[-1][1]])
    discrete = end
    for length, y in zip(lengths[::-1], ys[-2::-1], strict=True):
        discrete = discrete + length * jacobian(y).T @ discrete
    y, continuous, t = ys[-1], end, 3.0
    for length in lengths:
        y, continuous = (
            y - length * field(t, y),
            continuous + length * jacobian(y).T @ continuous,
        )
        t -= length
    got = with_a_short_step(framework, "euler")
    np.testing.assert_allclose(got[0][:2], discrete, rtol=1e-12)
    np.testing.assert_allclose(got[1][:2], continuous, rtol=1e-12)
    largest = max(map(np.linalg.norm, ys))
    assert got[2] == pytest.approx(np.linalg.norm(y - ys[0]) / largest, rel=1e-12)


ORDERS = [  # of gap and reversal error, on one mesh and with a short step
    ("euler", 0.0, 1, 1), ("heun2", 0.0, 3, 3), ("ralston", 0.0, 2, 3), ("bosh3", 0.0, 3, 3),
    ("rk4", 0.0, 4, 5), ("dopri5", 0.0, 5, 5), ("reversible_heun", 0.0, 4, 4),
    ("trapezoid", 0.0, 2, np.inf), ("gl4", 0.0, np.inf, np.inf), ("trapezoid", 0.5, 2, 3),
    ("heun2", 0.5, 3, 3), ("implicit_midpoint", 0.5, 3, 3), ("gl4", 0.5, 5, 5), ("gl6", 0.5, 7, 7),
]  # fmt: skip


@pytest.mark.parametrize(("method", "s", "gap", "reversal"), ORDERS)
def test_the_orders_of_gap_and_reversal_error_are_the_ones_derived(method, s, gap, reversal):
    assert commute.expected(method, "gap", s).order == gap
    assert commute.expected(method, "reversal", s).order == reversal


@cache
def measured(method, s):
    settings = load_study(
        study="commute", backends=["torch"], steps=[8, 16, 32], short_step=s or 0.5
    )
    groups = commute.cells(settings)
    cells = next(g for g in groups if (g[0]["method"], g[0]["short_step"]) == (method, s))
    return [
        CellRecord(study="commute", cell=c, digest="", status="ok", values=commute.measure(c))
        for c in cells
    ]


@pytest.mark.parametrize("quantity", ["gap", "reversal"])
@pytest.mark.parametrize(
    ("method", "s"),
    [("heun2", 0.0), ("trapezoid", 0.0), ("gl4", 0.0), ("gl4", 0.5), ("implicit_midpoint", 0.25)],
)
def test_a_small_grid_shows_the_orders(method, s, quantity):
    cells = measured(method, s)
    want = commute.expected(method, quantity, s)
    observed = observed_order(
        [c["h"] for c in cells], [c[quantity] for c in cells], commute.floors(cells), want
    )
    if want.exact:
        assert observed.state == "at round-off"
    else:
        assert observed.order == pytest.approx(want.order, abs=0.2)


def test_the_findings_say_the_order_seen_and_the_one_expected():
    lines = commute.findings([*measured("gl4", 0.0), *measured("gl4", 0.5)])
    assert len(lines) == 4
    assert "gl4: gap" in lines[0] and "expected zero: at round-off" in lines[0]
    assert "steps of T / (N + 0.5): gap order 5.0" in lines[2] and "expected 5" in lines[2]
