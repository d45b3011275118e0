"""Butcher tableaus: coefficients, order, stages, embedded weights, interpolant, citation.

A Runge-Kutta method advances y' = f(t, y) by

    Y_i     = y_n + h sum_j a_ij f(t_n + c_j h, Y_j),
    y_{n+1} = y_n + h sum_i b_i  f(t_n + c_i h, Y_i).

Both backends step from these arrays; nothing else in the package holds coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import sqrt

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

# Row sums and weights are exact up to the rounding of the published coefficients: Prince and
# Dormand print rationals good to about 1e-16 each, with entries of size up to 50.
_CONSISTENCY_TOLERANCE = 1e-13


@dataclass(frozen=True, eq=False)
class Tableau:
    """A Runge-Kutta method as data.

    Parameters
    ----------
    name : str
        The method's name, spelt as torchdiffeq spells it.
    a : (s, s) array
        Stage coefficients; strictly lower triangular for an explicit method.
    b : (s,) array
        Weights of the solution.
    c : (s,) array
        Nodes, as fractions of the step.
    order : int
        Order p of the solution: local error O(h^(p+1)).
    citation : str
        Where the coefficients come from.
    embedded : (s,) array, optional
        Weights of the embedded solution, for error control.
    embedded_order : int, optional
        Order of the embedded solution.
    interpolant : (s, d) array, optional
        Dense output: y(t_n + x h) = y_n + h sum_i k_i sum_j interpolant[i, j] x^(j+1) for x in
        [0, 1]. Methods without one use the cubic Hermite interpolant.
    interpolant_order : int, optional
        q such that the dense output has local error O(h^(q+1)).

    Raises
    ------
    ValueError
        If shapes disagree, or if row sums of `a` differ from `c`, or if weights do not sum to 1.
    """

    name: str
    a: Matrix
    b: Vector
    c: Vector
    order: int
    citation: str = field(repr=False)
    embedded: Vector | None = None
    embedded_order: int | None = None
    interpolant: Matrix | None = None
    interpolant_order: int | None = None

    def __post_init__(self) -> None:
        for attribute in ("a", "b", "c", "embedded", "interpolant"):
            value = getattr(self, attribute)
            if value is not None:
                array = np.array(value, dtype=np.float64)
                array.setflags(write=False)
                object.__setattr__(self, attribute, array)
        s = self.stages
        self._require(self.a.shape == (s, s), f"`a` must have shape {(s, s)}, got {self.a.shape}")
        self._require(self.b.shape == (s,), f"`b` must have shape {(s,)}, got {self.b.shape}")
        self._require(self.order >= 1, f"`order` must be at least 1, got {self.order}")
        worst = float(np.max(np.abs(self.a.sum(axis=1) - self.c)))
        self._require(
            worst < _CONSISTENCY_TOLERANCE,
            f"the row sums of `a` must equal the nodes `c`; they differ by {worst:.1e}",
        )
        self._require_weights("b", self.b)
        self._require(
            (self.embedded is None) == (self.embedded_order is None),
            "`embedded` and `embedded_order` must be given together",
        )
        if self.embedded is not None:
            self._require_weights("embedded", self.embedded)
        self._require(
            (self.interpolant is None) == (self.interpolant_order is None),
            "`interpolant` and `interpolant_order` must be given together",
        )
        if self.interpolant is not None:
            worst = float(np.max(np.abs(self.interpolant.sum(axis=1) - self.b)))
            self._require(
                self.interpolant.shape[0] == s and worst < 1e-11,
                f"the interpolant at x = 1 must reproduce `b`; it differs by {worst:.1e}",
            )

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"tableau {self.name!r}: {message}")

    def _require_weights(self, attribute: str, weights: Vector) -> None:
        self._require(
            weights.shape == (self.stages,)
            and abs(float(weights.sum()) - 1.0) < _CONSISTENCY_TOLERANCE,
            f"`{attribute}` must be {self.stages} weights that sum to 1, got {weights}",
        )

    @property
    def stages(self) -> int:
        """Number of stages s."""
        return self.c.shape[0]

    @cached_property
    def explicit(self) -> bool:
        """Whether every stage depends on earlier stages only."""
        return not np.any(np.triu(self.a))

    @cached_property
    def first_same_as_last(self) -> bool:
        """Whether the last stage is f(t_{n+1}, y_{n+1}), the first stage of the next step."""
        return bool(self.c[0] == 0 and self.c[-1] == 1 and np.array_equal(self.a[-1], self.b))

    @cached_property
    def evaluations(self) -> int:
        """Evaluations of f per step, a carried-over first-same-as-last stage not counted."""
        return self.stages - int(self.explicit and self.first_same_as_last)

    @cached_property
    def symplectic(self) -> bool:
        """Whether b_i a_ij + b_j a_ji = b_i b_j (Sanz-Serna 2016, doi:10.1137/151002769)."""
        ba = self.b[:, None] * self.a
        return bool(np.allclose(ba + ba.T, np.outer(self.b, self.b), rtol=0, atol=1e-14))

    @cached_property
    def symmetric(self) -> bool:
        """Whether the step with -h inverts the step with h: a_{s+1-i,s+1-j} + a_ij = b_j."""
        mirrored = self.a[::-1, ::-1]
        return bool(
            np.allclose(mirrored + self.a, self.b[None, :], rtol=0, atol=1e-14)
            and np.allclose(self.b, self.b[::-1], rtol=0, atol=1e-14)
        )


def _exact(text: str) -> list[float]:
    return [float(Fraction(word)) for word in text.split()]


def _lower(*rows: str) -> list[list[float]]:
    """Rows of a lower triangular matrix, completed with zeros to a square one."""
    s = len(rows)
    return [(_exact(row) + [0.0] * s)[:s] for row in rows]


def _explicit(name: str, rows: Sequence[str], b: str, c: str, order: int, citation: str, **more):
    return Tableau(
        name, np.array(_lower("", *rows)), np.array(_exact(b)), np.array(_exact(c)), order,
        citation, **more,
    )  # fmt: skip


def _weights(text: str) -> Vector:
    return np.array(_exact(text))


_HNW = (
    "Hairer, Norsett & Wanner, Solving Ordinary Differential Equations I, 2nd ed. (1993), "
    "doi:10.1007/978-3-540-78862-1"
)
_HW = (
    "Hairer & Wanner, Solving Ordinary Differential Equations II, 2nd ed. (1996), "
    "doi:10.1007/978-3-642-05221-7"
)

_EULER = _explicit("euler", (), "1", "0", 1, "Euler (1768); " + _HNW)
_MIDPOINT = _explicit(
    "midpoint", ("1/2",), "0 1", "0 1/2", 2, "Runge (1895); " + _HNW,
    embedded=_weights("1 0"), embedded_order=1,
)  # fmt: skip
_HEUN2 = _explicit(
    "heun2", ("1",), "1/2 1/2", "0 1", 2, "Heun (1900); " + _HNW,
    embedded=_weights("1 0"), embedded_order=1,
)  # fmt: skip
_HEUN3 = _explicit("heun3", ("1/3", "0 2/3"), "1/4 0 3/4", "0 1/3 2/3", 3, "Heun (1900); " + _HNW)
_RALSTON = _explicit(
    "ralston", ("2/3",), "1/4 3/4", "0 2/3", 2,
    "Ralston, Math. Comp. 16 (1962), doi:10.1090/S0025-5718-1962-0150954-0",
    embedded=_weights("1 0"), embedded_order=1,
)  # fmt: skip
# torchdiffeq's `rk4` is the 3/8 rule, not the textbook method.
_RK4 = _explicit(
    "rk4", ("1/3", "-1/3 1", "1 -1 1"), "1/8 3/8 3/8 1/8", "0 1/3 2/3 1", 4,
    "Kutta (1901), the 3/8 rule; " + _HNW,
)  # fmt: skip
_RK4_CLASSIC = _explicit(
    "rk4_classic", ("1/2", "0 1/2", "0 0 1"), "1/6 1/3 1/3 1/6", "0 1/2 1/2 1", 4,
    "Kutta (1901); " + _HNW,
)  # fmt: skip
# The interpolant is the cubic Hermite polynomial, written in the stages (the method is
# first-same-as-last, so f at both ends is there).
_BOSH3 = _explicit(
    "bosh3", ("1/2", "0 3/4", "2/9 1/3 4/9"), "2/9 1/3 4/9 0", "0 1/2 3/4 1", 3,
    "Bogacki & Shampine, Appl. Math. Lett. 2 (1989), doi:10.1016/0893-9659(89)90079-7",
    embedded=_weights("7/24 1/4 1/3 1/8"), embedded_order=2,
    interpolant=np.array(
        [_exact("1 -4/3 5/9"), _exact("0 1 -2/3"), _exact("0 4/3 -8/9"), _exact("0 -1 1")]
    ),
    interpolant_order=3,
)  # fmt: skip
# Quartic interpolant: Shampine's, the one MATLAB's ode45 and SciPy's RK45 use.
_DOPRI5 = _explicit(
    "dopri5",
    (
        "1/5",
        "3/40 9/40",
        "44/45 -56/15 32/9",
        "19372/6561 -25360/2187 64448/6561 -212/729",
        "9017/3168 -355/33 46732/5247 49/176 -5103/18656",
        "35/384 0 500/1113 125/192 -2187/6784 11/84",
    ),
    "35/384 0 500/1113 125/192 -2187/6784 11/84 0",
    "0 1/5 3/10 4/5 8/9 1 1",
    5,
    "Dormand & Prince, J. Comput. Appl. Math. 6 (1980), doi:10.1016/0771-050X(80)90013-3; "
    "interpolant and error weights: Shampine, Math. Comp. 46 (1986), doi:10.2307/2008219",
    embedded=_weights("1951/21600 0 22642/50085 451/720 -12231/42400 649/6300 1/60"),
    embedded_order=4,
    interpolant=np.array([
        _exact("1 -8048581381/2820520608 8663915743/2820520608 -12715105075/11282082432"),
        _exact("0 0 0 0"),
        _exact("0 131558114200/32700410799 -68118460800/10900136933 87487479700/32700410799"),
        _exact("0 -1754552775/470086768 14199869525/1410260304 -10690763975/1880347072"),
        _exact("0 127303824393/49829197408 -318862633887/49829197408 701980252875/199316789632"),
        _exact("0 -282668133/205662961 2019193451/616988883 -1453857185/822651844"),
        _exact("0 40617522/29380423 -110615467/29380423 69997945/29380423"),
    ]),
    interpolant_order=4,
)  # fmt: skip
# Printed to 17 significant digits; the interpolant factors are multiplied out by numpy.
_TSIT5_B = "0.09646076681806523 1/100 0.4798896504144996 1.379008574103742 -3.290069515436081 " \
    "2.324710524099774"  # fmt: skip
_TSIT5 = _explicit(
    "tsit5",
    (
        "161/1000",
        "-0.008480655492356989 0.335480655492357",
        "2.8971530571054935 -6.359448489975075 4.362295432869581",
        "5.325864828439257 -11.748883564062828 7.4955393428898365 -0.09249506636175525",
        "5.86145544294642 -12.92096931784711 8.159367898576159 -0.071584973281401 "
        "-0.028269050394068383",
        _TSIT5_B,
    ),
    _TSIT5_B + " 0",
    "0 161/1000 327/1000 9/10 0.9800255409045097 1 1",
    5,
    "Tsitouras, Comput. Math. Appl. 62 (2011), doi:10.1016/j.camwa.2011.06.002",
    embedded=_weights(
        "0.09468075576583945807478876255758922856 0.009183565540343254 0.4877705284247616 "
        "1.234297566930479 -2.7077123499835256 1.866628418170587 1/66"
    ),
    embedded_order=4,
    interpolant=np.array([
        -1.0530884977290216 * np.convolve(
            [-1.3299890189751412, 1], [0.7139816917074209, -1.4364028541716351, 1]
        ),
        0.1017 * np.array([0, 1.2949852507374631, -2.1966568338249754, 1]),
        2.490627285651252793 * np.array([0, 1.57803468208092486, -2.38535645472061657, 1]),
        -16.54810288924490272
        * np.convolve([0, -1.21712927295533244, 1], [-0.61620406037800089, 1]),
        47.37952196281928122
        * np.convolve([0, -1.203071208372362603, 1], [-0.658047292653547382, 1]),
        -34.87065786149660974 * np.convolve([0, -1.2, 1], [-0.666666666666666667, 1]),
        2.5 * np.convolve([0, -1, 1], [-0.6, 1]),
    ]),
    interpolant_order=4,
)  # fmt: skip
_DOPRI8_B = (
    "14005451/335480064 0 0 0 0 -59238493/1068277825 181606767/758867731 561292985/797845732 "
    "-1041891430/1371343529 760417239/1151165299 118820643/751138087 -528747749/2220607170 1/4"
)
# The pair has 13 stages; f at the end of the step is added as the 14th, for the interpolant.
_DOPRI8 = _explicit(
    "dopri8",
    (
        "1/18",
        "1/48 1/16",
        "1/32 0 3/32",
        "5/16 0 -75/64 75/64",
        "3/80 0 0 3/16 3/20",
        "29443841/614563906 0 0 77736538/692538347 -28693883/1125000000 23124283/1800000000",
        "16016141/946692911 0 0 61564180/158732637 22789713/633445777 545815736/2771057229 "
        "-180193667/1043307555",
        "39632708/573591083 0 0 -433636366/683701615 -421739975/2616292301 100302831/723423059 "
        "790204164/839813087 800635310/3783071287",
        "246121993/1340847787 0 0 -37695042795/15268766246 -309121744/1061227803 "
        "-12992083/490766935 6005943493/2108947869 393006217/1396673457 123872331/1001029789",
        "-1028468189/846180014 0 0 8478235783/508512852 1311729495/1432422823 "
        "-10304129995/1701304382 -48777925059/3047939560 15336726248/1032824649 "
        "-45442868181/3398467696 3065993473/597172653",
        "185892177/718116043 0 0 -3185094517/667107341 -477755414/1098053517 "
        "-703635378/230739211 5731566787/1027545527 5232866602/850066563 -4093664535/808688257 "
        "3962137247/1805957418 65686358/487910083",
        "403863854/491063109 0 0 -5068492393/434740067 -411421997/543043805 652783627/914296604 "
        "11173962825/925320556 -13158990841/6184727034 3936647629/1978049680 "
        "-160528059/685178525 248638103/1413531060 0",
        _DOPRI8_B,
    ),
    _DOPRI8_B + " 0",
    "0 1/18 1/12 1/8 5/16 3/8 59/400 93/200 5490023248/9719169821 13/20 1201146811/1299019798 "
    "1 1 1",
    8,
    "Prince & Dormand, J. Comput. Appl. Math. 7 (1981), doi:10.1016/0771-050X(81)90010-3; "
    "interpolant: Bogacki & Shampine, Comput. Math. Appl. 20 (1990), "
    "doi:10.1016/0898-1221(90)90025-H",
    embedded=_weights(
        "13451932/455176623 0 0 0 0 -808719846/976000145 1757004468/5645159321 "
        "656045339/265891186 -3867574721/1518517206 465885868/322736535 53011238/667516719 "
        "2/45 0 0"
    ),
    embedded_order=7,
    interpolant=np.array([
        [1.0, -6.6910181737837595697, 19.9990069333683970610, -30.0610568289666450593,
         22.1396504998094068976, -6.3448349392860401388],
        [0.0] * 6, [0.0] * 6, [0.0] * 6, [0.0] * 6,
        [0.0, -7.6142658045872677172, 52.2273532792945524050, -121.4999627731334642623,
         116.4422149550342161651, -39.6107919852202505218],
        [0.0, 10.7281392630428866124, -46.8919164181093621583, 83.1721004639847717481,
         -67.1451318825957197185, 20.3761213808791436958],
        [0.0, 0.5526637063753648783, -0.1890893225010595467, 9.5724507555993664382,
         -16.5672243527496524646, 7.3347098826795362023],
        [0.0, 4.2186562625665153803, -35.7075975946222072821, 87.8406057677205645007,
         -89.9916014847245016028, 32.8801774352459155182],
        [0.0, -0.6627209125361597559, 6.2736448083240352160, -17.4152107770762969005,
         22.6237489648532849093, -10.1588990526426760954],
        [0.0, -1.2636789001135462218, 10.3160881272450748458, -28.5903289514790976966,
         32.2362340167355370113, -12.5401268098782561200],
        [0.0, 5.4106037898590422230, -34.7650769866611817349, 81.6630950584341412934,
         -82.1020315488359848644, 29.5553001484516038033],
        [0.0, -7.0321379067945741781, 47.7457971078225540396, -114.9375291377009418170,
         116.2662185791119533462, -41.7923486424390588923],
        [0.0, 2.3537586759714983486, -19.0082099341608028453, 50.2558364226176017553,
         -53.9020777466385396792, 20.3006925822100825485],
    ]),
    interpolant_order=5,
)  # fmt: skip

_IMPLICIT_EULER = Tableau(
    "implicit_euler", np.array([[1.0]]), np.array([1.0]), np.array([1.0]), 1, _HW
)
_IMPLICIT_MIDPOINT = Tableau(
    "implicit_midpoint", np.array([[0.5]]), np.array([1.0]), np.array([0.5]), 2, _HW
)
_TRAPEZOID = Tableau(
    "trapezoid", np.array([[0.0, 0.0], [0.5, 0.5]]), np.array([0.5, 0.5]), np.array([0.0, 1.0]),
    2, _HW,
)  # fmt: skip
_G = 1 - 1 / sqrt(2)
_SDIRK2 = Tableau(
    "sdirk2", np.array([[_G, 0.0], [1 - _G, _G]]), np.array([1 - _G, _G]), np.array([_G, 1.0]), 2,
    "Alexander, SIAM J. Numer. Anal. 14 (1977), doi:10.1137/0714068",
)  # fmt: skip
_D, _W = 1 - 1 / sqrt(2), sqrt(2) / 4
_TRBDF2 = Tableau(
    "trbdf2",
    np.array([[0.0, 0.0, 0.0], [_D, _D, 0.0], [_W, _W, _D]]),
    np.array([_W, _W, _D]),
    np.array([0.0, 2 * _D, 1.0]),
    2,
    "Hosea & Shampine, Appl. Numer. Math. 20 (1996), doi:10.1016/0168-9274(95)00115-8",
    embedded=np.array([(1 - _W) / 3, (3 * _W + 1) / 3, _D / 3]),
    embedded_order=3,
)
_RADAU_IIA3 = Tableau(
    "radauIIA3", np.array([_exact("5/12 -1/12"), _exact("3/4 1/4")]), _weights("3/4 1/4"),
    _weights("1/3 1"), 3, "Ehle (1969); " + _HW,
)  # fmt: skip
_S6 = sqrt(6)
_RADAU_IIA5 = Tableau(
    "radauIIA5",
    np.array([
        [(88 - 7 * _S6) / 360, (296 - 169 * _S6) / 1800, (-2 + 3 * _S6) / 225],
        [(296 + 169 * _S6) / 1800, (88 + 7 * _S6) / 360, (-2 - 3 * _S6) / 225],
        [(16 - _S6) / 36, (16 + _S6) / 36, 1 / 9],
    ]),
    np.array([(16 - _S6) / 36, (16 + _S6) / 36, 1 / 9]),
    np.array([(4 - _S6) / 10, (4 + _S6) / 10, 1.0]),
    5,
    "Ehle (1969); " + _HW,
)  # fmt: skip
_S3 = sqrt(3)
_GL4 = Tableau(
    "gl4", np.array([[1 / 4, 1 / 4 - _S3 / 6], [1 / 4 + _S3 / 6, 1 / 4]]), np.array([0.5, 0.5]),
    np.array([1 / 2 - _S3 / 6, 1 / 2 + _S3 / 6]), 4,
    "Hammer & Hollingsworth (1955); Butcher, Math. Comp. 18 (1964), doi:10.2307/2003405",
)  # fmt: skip
_S15 = sqrt(15)
_GL6 = Tableau(
    "gl6",
    np.array([
        [5 / 36, 2 / 9 - _S15 / 15, 5 / 36 - _S15 / 30],
        [5 / 36 + _S15 / 24, 2 / 9, 5 / 36 - _S15 / 24],
        [5 / 36 + _S15 / 30, 2 / 9 + _S15 / 15, 5 / 36],
    ]),
    np.array([5 / 18, 4 / 9, 5 / 18]),
    np.array([1 / 2 - _S15 / 10, 1 / 2, 1 / 2 + _S15 / 10]),
    6,
    "Kuntzmann (1961); Butcher, Math. Comp. 18 (1964), doi:10.2307/2003405",
)  # fmt: skip

TABLEAUS: dict[str, Tableau] = {
    tableau.name: tableau
    for tableau in (
        _EULER, _MIDPOINT, _HEUN2, _RALSTON, _HEUN3, _BOSH3, _RK4, _RK4_CLASSIC, _TSIT5, _DOPRI5,
        _DOPRI8, _IMPLICIT_EULER, _IMPLICIT_MIDPOINT, _TRAPEZOID, _SDIRK2, _TRBDF2, _RADAU_IIA3,
        _GL4, _RADAU_IIA5, _GL6,
    )
}  # fmt: skip


def get_tableau(name: str) -> Tableau:
    """Return the tableau of a method.

    Parameters
    ----------
    name : str
        One of the keys of `TABLEAUS`.

    Returns
    -------
    Tableau

    Raises
    ------
    ValueError
        If there is no method of that name; the message lists those there are.
    """
    try:
        return TABLEAUS[name]
    except (KeyError, TypeError):
        raise ValueError(f"`method` must be one of {', '.join(TABLEAUS)}; got {name!r}") from None
