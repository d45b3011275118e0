"""Linear multistep methods: coefficients, order, citation; and which methods have a history.

A k-step method advances y' = f(t, y) on an equidistant mesh by

    y_{n+1} = sum_j a_j y_{n-j} + h sum_j b_j f(t_{n-j}, y_{n-j}) + h b f(t_{n+1}, y_{n+1}),

j = 0, ..., k - 1. What it keeps of y_{n-1}, y_{n-2}, ... is its history. In every interval without
a breakpoint the first k - 1 steps are Runge-Kutta steps, by `STARTER`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

Coefficients = tuple[Fraction, ...]

# Its local error, O(h^5), is below the global one of every method here.
STARTER = "rk4_classic"


@dataclass(frozen=True)
class Multistep:
    """A linear multistep method as data.

    Parameters
    ----------
    name : str
        The method's name.
    values : tuple of Fraction
        a_0, a_1, ..., the weights of y_n, y_{n-1}, ...
    slopes : tuple of Fraction
        b_0, b_1, ..., the weights of h f_n, h f_{n-1}, ...
    next_slope : Fraction
        b, the weight of h f_{n+1}; 0 for an explicit method.
    order : int
        Order p of the solution: local error O(h^(p+1)).
    citation : str
        Where the coefficients come from.

    Raises
    ------
    ValueError
        If the order is not exactly `order`, or if the method is not zero-stable.
    """

    name: str
    values: Coefficients
    slopes: Coefficients
    next_slope: Fraction
    order: int
    citation: str = field(repr=False)

    def __post_init__(self) -> None:
        observed = 0
        while self._defect(observed) == 0:
            observed += 1
        if observed - 1 != self.order:
            raise ValueError(
                f"multistep method {self.name!r}: `order` must be {observed - 1}, up to which the "
                f"formula is exact for polynomials; got {self.order}"
            )
        roots = self.roots
        double = [np.sum(np.abs(roots - root) < 1e-6) > 1 for root in roots]
        if np.any(np.abs(roots) > 1 + 1e-9) or np.any((np.abs(roots) > 1 - 1e-6) & double):
            raise ValueError(
                f"multistep method {self.name!r} is not zero-stable: `values` must give roots in "
                f"the unit disc, simple ones on its edge; got {roots}"
            )

    def _defect(self, q: int) -> Fraction:
        """What the formula leaves of y = t^q at t_{n+1} = 1, with h = 1."""

        def power(t: int, q: int) -> Fraction:
            return Fraction(1) if q == 0 else Fraction(t) ** q

        defect = power(1, q) - sum(a * power(-j, q) for j, a in enumerate(self.values))
        if q > 0:
            defect -= q * self.next_slope
            defect -= q * sum(b * power(-j, q - 1) for j, b in enumerate(self.slopes))
        return Fraction(defect)

    @property
    def steps(self) -> int:
        """Number of steps k that a value is made of."""
        return max(len(self.values), len(self.slopes))

    @property
    def explicit(self) -> bool:
        """Whether f(t_{n+1}, y_{n+1}) is not needed."""
        return self.next_slope == 0

    @property
    def slope_sum(self) -> Fraction:
        """b + sum_j b_j, by which the multipliers of the steps are divided in the limit h -> 0.

        With r_n the residual of the step that ends at t_n, slope_sum dL/dr_n tends to lambda(t_n),
        if the method has no parasitic root on the unit circle. The sum is 1 for Adams methods, 2/3
        for bdf2, 6/11 for bdf3 and 2 for leapfrog.
        """
        return self.next_slope + sum(self.slopes, Fraction(0))

    @property
    def roots(self) -> np.ndarray:
        """Roots of z^k - sum_j a_j z^(k-1-j): 1, and the parasitic ones."""
        return np.roots([1.0, *(-float(a) for a in self.values)])


def _exact(text: str) -> Coefficients:
    return tuple(Fraction(word) for word in text.split())


_HNW = (
    "Hairer, Norsett & Wanner, Solving Ordinary Differential Equations I, 2nd ed. (1993), III.1, "
    "doi:10.1007/978-3-540-78862-1"
)


def _adams(name: str, slopes: str, order: int, next_slope: str = "0") -> Multistep:
    return Multistep(name, _exact("1"), _exact(slopes), Fraction(next_slope), order, _HNW)


def _bdf(name: str, values: str, next_slope: str, order: int) -> Multistep:
    citation = f"Curtiss & Hirschfelder, Proc. Natl. Acad. Sci. 38 (1952); {_HNW}"
    return Multistep(name, _exact(values), (), Fraction(next_slope), order, citation)


MULTISTEP: dict[str, Multistep] = {
    method.name: method
    for method in (
        _adams("ab2", "3/2 -1/2", 2),
        _adams("ab3", "23/12 -16/12 5/12", 3),
        _adams("ab4", "55/24 -59/24 37/24 -9/24", 4),
        _adams("am3", "8/12 -1/12", 3, "5/12"),
        _adams("am4", "19/24 -5/24 1/24", 4, "9/24"),
        _bdf("bdf2", "4/3 -1/3", "2/3", 2),
        _bdf("bdf3", "18/11 -9/11 2/11", "6/11", 3),
        Multistep("leapfrog", _exact("0 1"), _exact("2"), Fraction(0), 2, _HNW),
    )
}

# Kidger, Foster, Li & Lyons 2021, arXiv:2105.13493: a one-step method of order 2 on two states,
#     z_{n+1} = 2 y_n - z_n + h f(t_n, z_n),
#     y_{n+1} = y_n + h/2 (f(t_n, z_n) + f(t_{n+1}, z_{n+1})),   z_0 = y_0.
# Its second state z is its history.
REVERSIBLE_HEUN = "reversible_heun"

# Every method that has a history.
METHODS = (*MULTISTEP, REVERSIBLE_HEUN)
