"""Expected order of each (method, quantity), and the order that errors show.

Four quantities are measured at every step size h:

- `discrete`: |discrete gradient - exact gradient|
- `continuous`: |gradient by the adjoint ODE, solved backward with the same method and h - exact|
- `gap`: |discrete - continuous| at the same h
- `adjoint`: max_n |lambda_n - lambda(t_n)|, lambda_n = dL/dy_n of the discrete solution

Three more say where lambda_n converges; the study of the adjoint along the way measures them:

- `adjoint_interior`: as `adjoint`, over the steps with t_n in the middle half of the interval
- `multiplier`: max_n |slope_sum dL/dr_n - lambda(t_n)|, r_n the residual of the multistep formula
  that ends at t_n, slope_sum as in `contadj.multistep`; a multistep method's alone
- `multiplier_interior`: as `multiplier`, over the middle half
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .multistep import MULTISTEP
from .tableaus import TABLEAUS

QUANTITIES = ("discrete", "continuous", "gap", "adjoint")
ALONG = ("adjoint_interior", "multiplier", "multiplier_interior")

_SANDU_2006 = "Sandu 2006, doi:10.1007/11758549_76"
_WALTHER_2007 = "Walther 2007, doi:10.1007/s10589-006-0397-3"
_SANZ_SERNA_2016 = "Sanz-Serna 2016, doi:10.1137/151002769"
_MEASURED = "measured on smooth nonlinear, time-dependent problems"

_RUNGE_KUTTA = {
    "discrete": f"order p of the method: {_SANDU_2006}; {_WALTHER_2007}",
    "continuous": "order p of the method, applied to (y, lambda, gradient) in reverse time",
    "gap": "order p: the difference of two approximations of order p",
    "adjoint": f"order p of the method, at every step: {_SANDU_2006}; {_WALTHER_2007}",
    "adjoint_interior": f"order p of the method: {_SANDU_2006}; {_WALTHER_2007}",
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
}
# Methods without a tableau in `contadj.tableaus`.
_ORDERS = {"adaptive_heun": 2, "fehlberg2": 2, "reversible_heun": 2}

# Methods with a history: dL/dy_0 and dL/dtheta converge at order p, and lambda_n = dL/dy_n with the
# history held fixed need not.
_ORDERS |= {name: method.order for name, method in MULTISTEP.items()}
_SANDU_2008 = "Sandu 2008, doi:10.1007/978-3-540-68942-3_1"
_BDF = f"{_SANDU_2008}; Beigel, Mommer, Wirsching & Bock 2013, doi:10.1007/s00211-013-0570-4"
_MULTISTEP = _RUNGE_KUTTA | {"discrete": f"order p of the method: {_SANDU_2008}"}
_ADAMS = (
    1,
    "order 1 whatever the order of the method: the adjoint recursion takes every f_y at t_n and "
    f"starts from one value at the end: {_SANDU_2008}",
)
_LEAPFROG = (
    0,
    f"goes to and fro about lambda(t_n) / 2, the parasitic root being -1: {_SANDU_2008}",
)
_REVERSIBLE_HEUN = (
    2,
    "order p: dL/dz_n of the second state z is O(h^2), of a size that alternates from step to step",
)
_END = f"the last one is slope_sum (I - h b f_y)^-T dC/dy, and not lambda(T): {_BDF}"
_INNER = f"order p of the method, once the layer at the end has decayed: {_BDF}"
for _name, _method in MULTISTEP.items():
    for _quantity in ("adjoint", *ALONG):
        _EXCEPTIONS[_name, _quantity] = _LEAPFROG if _name == "leapfrog" else _ADAMS
    if _name.startswith("bdf"):
        _tends = f"tends to lambda(t_n) / slope_sum, slope_sum = {_method.slope_sum}: {_BDF}"
        _EXCEPTIONS[_name, "adjoint"] = _EXCEPTIONS[_name, "adjoint_interior"] = 0, _tends
        _EXCEPTIONS[_name, "multiplier"] = 0, _END
        _EXCEPTIONS[_name, "multiplier_interior"] = _method.order, _INNER
for _quantity in ("adjoint", "adjoint_interior"):
    _EXCEPTIONS["reversible_heun", _quantity] = _REVERSIBLE_HEUN

# torchdiffeq's methods that carry more than y_n from step to step: read in its 0.2.5.
_ORDERS |= {"explicit_adams": 4, "implicit_adams": 5}
_START = "the order grows from a start by rk4 and one formula of order {}, local error O(h^{})"
for _quantity in ("discrete", "continuous", "gap"):
    _EXCEPTIONS["explicit_adams", _quantity] = 4, _START.format(3, 4)
    _EXCEPTIONS["implicit_adams", _quantity] = 5, _START.format(4, 5)
_CARRIED = (
    1,
    "order 1: the slope carried into a step was not evaluated at y_n, so that with it held fixed "
    "dy_{n+1}/dy_n lacks a term of size h",
)
for _quantity in ("adjoint", "adjoint_interior"):
    for _name in ("explicit_adams", "implicit_adams"):
        _EXCEPTIONS[_name, _quantity] = _ADAMS
    for _name in ("adaptive_heun", "fehlberg2"):
        _EXCEPTIONS[_name, _quantity] = _CARRIED

# Diffrax's solvers, by the order that their documentation states.
_ORDERS |= {
    "Euler": 1, "Heun": 2, "Midpoint": 2, "Ralston": 2, "Bosh3": 3, "Tsit5": 5, "Dopri5": 5,
    "Dopri8": 8, "ImplicitEuler": 1, "Kvaerno3": 3, "Kvaerno4": 4, "Kvaerno5": 5,
    "ReversibleHeun": 2, "LeapfrogMidpoint": 2,
}  # fmt: skip
for _name, _same in (
    ("Heun", "heun2"), ("ReversibleHeun", "reversible_heun"), ("LeapfrogMidpoint", "leapfrog"),
):  # fmt: skip
    for _quantity in (*QUANTITIES, *ALONG):
        if (_same, _quantity) in _EXCEPTIONS:
            _EXCEPTIONS[_name, _quantity] = _EXCEPTIONS[_same, _quantity]


def expected_order(method: str, quantity: str) -> ExpectedOrder | None:
    """Return the order that theory states for a method and a quantity.

    Parameters
    ----------
    method : str
        Name of a method.
    quantity : str
        One of `QUANTITIES` or `ALONG`.

    Returns
    -------
    ExpectedOrder or None
        None where no statement is known for the method.

    Raises
    ------
    ValueError
        If there is no such quantity.
    """
    known = (*QUANTITIES, *ALONG)
    if quantity not in known:
        raise ValueError(f"`quantity` must be one of {', '.join(known)}; got {quantity!r}")
    tableau = TABLEAUS.get(method)
    p = tableau.order if tableau else _ORDERS.get(method)
    if p is None or (quantity.startswith("multiplier") and method not in MULTISTEP):
        return None
    if quantity == "gap" and tableau and tableau.symplectic and tableau.symmetric:
        source = f"zero, the method is symplectic and symmetric: {_SANZ_SERNA_2016}"
        return ExpectedOrder(math.inf, 0.0, source)
    sources = _MULTISTEP if method in MULTISTEP else _RUNGE_KUTTA
    order, source = _EXCEPTIONS.get((method, quantity)) or (p, sources[quantity])
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
