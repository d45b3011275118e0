"""Expected order of each (method, quantity), and the order that errors show.

Four quantities are measured at every step size h:

- `discrete`: |discrete gradient - exact gradient|
- `continuous`: |gradient by the adjoint ODE, solved backward with the same method and h - exact|
- `gap`: |discrete - continuous| at the same h
- `adjoint`: max_n |lambda_n - lambda(t_n)|, lambda_n = dL/dy_n of the discrete solution
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .tableaus import TABLEAUS

QUANTITIES = ("discrete", "continuous", "gap", "adjoint")

_SANDU_2006 = "Sandu 2006, doi:10.1007/11758549_76"
_WALTHER_2007 = "Walther 2007, doi:10.1007/s10589-006-0397-3"
_SANZ_SERNA_2016 = "Sanz-Serna 2016, doi:10.1137/151002769"
_MEASURED = "measured on smooth nonlinear, time-dependent problems"

_RUNGE_KUTTA = {
    "discrete": f"order p of the method: {_SANDU_2006}; {_WALTHER_2007}",
    "continuous": "order p of the method, applied to (y, lambda, gradient) in reverse time",
    "gap": "order p: the difference of two approximations of order p",
    "adjoint": f"order p of the method, at every step: {_SANDU_2006}; {_WALTHER_2007}",
}


@dataclass(frozen=True)
class ExpectedOrder:
    """The order a quantity should show, and why.

    Parameters
    ----------
    order : float
        p such that the quantity is O(h^p); infinity where it is zero for every h.
    tolerance : float
        How far the order of the finest pair may be from `order`.
    source : str
        The statement and its reference.
    """

    order: float
    tolerance: float
    source: str

    @property
    def exact(self) -> bool:
        """Whether the quantity is zero up to round-off for every h."""
        return math.isinf(self.order)


# What differs from "order p of the method", method by method.
_EXCEPTIONS: dict[tuple[str, str], tuple[float, str]] = {
    ("heun2", "gap"): (3, f"superconvergent, one order above p: {_MEASURED}"),
    ("reversible_heun", "gap"): (4, f"superconvergent, two orders above p: {_MEASURED}"),
    ("leapfrog", "adjoint"): (
        0,
        "dL/dy_n of a two-step method does not converge: Sandu 2008, "
        "doi:10.1007/978-3-540-68942-3_1",
    ),
}
# Methods without a tableau in `contadj.tableaus`.
_ORDERS = {"adaptive_heun": 2, "fehlberg2": 2, "reversible_heun": 2, "leapfrog": 2}


def expected_order(method: str, quantity: str) -> ExpectedOrder | None:
    """Return the order that theory states for a method and a quantity.

    Parameters
    ----------
    method : str
        Name of a method.
    quantity : str
        One of `QUANTITIES`.

    Returns
    -------
    ExpectedOrder or None
        None where no statement is known for the method.

    Raises
    ------
    ValueError
        If `quantity` is not one of `QUANTITIES`.
    """
    if quantity not in QUANTITIES:
        raise ValueError(f"`quantity` must be one of {', '.join(QUANTITIES)}; got {quantity!r}")
    tableau = TABLEAUS.get(method)
    p = tableau.order if tableau else _ORDERS.get(method)
    if p is None:
        return None
    if quantity == "gap" and tableau and tableau.symplectic and tableau.symmetric:
        source = f"zero, the method is symplectic and symmetric: {_SANZ_SERNA_2016}"
        return ExpectedOrder(math.inf, 0.0, source)
    order, source = _EXCEPTIONS.get((method, quantity), (p, _RUNGE_KUTTA[quantity]))
    # Few pairs lie between the pre-asymptotic steps and round-off from order 5 on.
    return ExpectedOrder(order, 0.15 if p < 5 else 0.4, source)


def round_off_floor(dtype: str, mesh_size: int) -> float:
    """Relative error below which a gradient computed in `dtype` is round-off.

    Rounding errors of M steps add up like a random walk, eps M^(1/2), on top of a few eps; the
    factor 30 keeps their share of an error that counts below 10 %, 0.1 in an order.

    Parameters
    ----------
    dtype : str
        "float32" or "float64".
    mesh_size : int
        Number of steps M.
    """
    return 30 * float(np.finfo(dtype).eps) * math.sqrt(mesh_size)


@dataclass(frozen=True)
class ObservedOrder:
    """The order that errors show.

    Parameters
    ----------
    order : float or None
        Order of the finest usable pair.
    pairwise : tuple of float
        log(e_i / e_{i+1}) / log(h_i / h_{i+1}) of all neighbouring pairs, coarsest first; nan
        where an error is missing or zero.
    usable : tuple of bool
        Whether both errors of the pair are above the round-off floor.
    state : str
        "as expected", "deviates", "at round-off", "not enough pairs", "still changing" (not at
        the expected order, but still coming closer) or "no statement".
    reason : str
        One line; empty where the order is as expected.
    """

    order: float | None
    pairwise: tuple[float, ...]
    usable: tuple[bool, ...]
    state: str
    reason: str


def observed_order(
    h: Sequence[float],
    errors: Sequence[float | None],
    floors: Sequence[float],
    expected: ExpectedOrder | None,
) -> ObservedOrder:
    """Return the order that errors show, and hold it against the expected one.

    The order is that of the finest pair of which both errors are above the floor. A fit through
    all points would mix in coarse steps, where the order is not reached, and round-off.

    Parameters
    ----------
    h : sequence of float
        Step sizes, strictly decreasing.
    errors : sequence of float or None
        Errors at these step sizes; None where there is none.
    floors : sequence of float
        Errors up to these values are round-off.
    expected : ExpectedOrder or None
        None where nothing is stated.

    Raises
    ------
    ValueError
        If the lengths differ or `h` does not decrease.
    """
    if not len(h) == len(errors) == len(floors):
        raise ValueError(
            f"`h`, `errors` and `floors` must have one length, got {len(h)}, {len(errors)} and "
            f"{len(floors)}"
        )
    if any(fine >= coarse for coarse, fine in pairwise(h)):
        raise ValueError(f"`h` must decrease strictly, got {list(h)}")
    finite = [e if e is not None and math.isfinite(e) else None for e in errors]
    above = [e is not None and e > floor for e, floor in zip(finite, floors, strict=True)]
    orders, usable = [], []
    for i in range(len(h) - 1):
        coarse, fine = finite[i], finite[i + 1]
        if coarse and fine:
            orders.append(math.log(coarse / fine) / math.log(h[i] / h[i + 1]))
        else:
            orders.append(math.nan)
        usable.append(above[i] and above[i + 1])
    reliable = [order for order, use in zip(orders, usable, strict=True) if use]
    state, reason = _judge(reliable, [e for e in finite if e is not None], above, expected)
    order = reliable[-1] if reliable else None
    return ObservedOrder(order, tuple(orders), tuple(usable), state, reason)


def _judge(
    orders: list[float], errors: list[float], above: list[bool], expected: ExpectedOrder | None
) -> tuple[str, str]:
    if not errors:
        return "not enough pairs", "no cell has a value"
    if not any(above):
        return "at round-off", "every error is at the round-off floor"
    if expected is None:
        return "no statement", "no expected order is known for this method"
    if expected.exact:
        return "deviates", f"should be zero up to round-off, but reaches {max(errors):.1e}"
    if len(orders) < 2:
        return "not enough pairs", f"{len(orders)} pair(s) of errors above the round-off floor"
    before, order = orders[-2:]
    distance = abs(order - expected.order)
    if distance <= expected.tolerance:
        return "as expected", ""
    if abs(before - expected.order) - distance > expected.tolerance / 3:
        return "still changing", f"{before:.2f}, {order:.2f} on the way to {expected.order:g}"
    how = "faster" if order > expected.order else "slower"
    return "deviates", f"converges {how} than {expected.order:g}: {before:.2f}, {order:.2f}"
