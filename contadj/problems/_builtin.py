"""The built-in problems: constants, closed forms and reference values.

The vector fields and costs are in `contadj.torch._problems` and `contadj.jax._problems`, written
once in each framework; the docstrings here state them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from io import StringIO

import numpy as np

from ._problem import Gradient, ProblemData


def lin() -> ProblemData:
    """Linear, autonomous, scalar: y' = a y + theta, L = (y(T) - 0.3)^2; closed form."""
    a, theta, y0, t1, target = -0.8, 0.5, 1.2, 2.0, 0.3
    growth = np.exp(a * t1)
    y1 = growth * y0 + theta * (growth - 1) / a
    c = 2 * (y1 - target)
    d_a = c * (t1 * growth * y0 + theta * (a * t1 * growth - growth + 1) / a**2)
    d_theta = c * (growth - 1) / a
    return ProblemData(
        "lin",
        np.array([y0]),
        {"a": np.array(a), "theta": np.array(theta)},
        0.0,
        t1,
        {"target": np.array(target)},
        gradient=Gradient.of((y1 - target) ** 2, [c * growth], [d_a, d_theta]),
        adjoint=lambda t: np.array([c * np.exp(a * (t1 - t))]),
    )


def nonaut() -> ProblemData:
    """Linear in y with explicit time: y' = cos(t) y + theta, L = (y(T) - 0.3)^2; closed form."""
    theta, y0, t1, target = 0.5, 1.0, 4.0, 0.3
    integral = 3.0626740257279970  # of exp(-sin s) over [0, 4]
    growth = np.exp(np.sin(t1))
    y1 = growth * (y0 + theta * integral)
    c = 2 * (y1 - target)
    return ProblemData(
        "nonaut",
        np.array([y0]),
        {"theta": np.array(theta)},
        0.0,
        t1,
        {"target": np.array(target)},
        gradient=Gradient.of((y1 - target) ** 2, [c * growth], [c * growth * integral]),
        adjoint=lambda t: np.array([c * np.exp(np.sin(t1) - np.sin(t))]),
    )


def pend() -> ProblemData:
    """Damped pendulum with a running cost; reference gradient from 80-bit arithmetic.

    x' = v, v' = -b v - k sin x, L = int (x^2 + 0.1 v^2) dt + (x(T) - 0.2)^2 + v(T)^2 / 2.
    """
    return ProblemData(
        "pend",
        np.array([1.0, 0.5]),
        {"b": np.array(0.3), "k": np.array(2.0)},
        0.0,
        3.0,
        {"target": np.array(0.2)},
        gradient=Gradient.of(
            2.5163076029908411,
            [4.0148221024091919, 1.5599533751186352],
            [-3.02072405013184, -0.12226617254457035],
        ),
    )


def mlp() -> ProblemData:
    """A small neural vector field: y' = W2 tanh(W1 y + b1) + b2, L = |y(T) - (0.3, 0.4)|^2 / 2."""
    i, j = np.indices((4, 2))
    k, m = np.indices((2, 4))
    return ProblemData(
        "mlp",
        np.array([0.5, -0.7]),
        {
            "W1": np.sin(1.0 + i + 2 * j),
            "W2": 0.8 * np.cos(2.0 * k - m),
            "b1": np.array([-0.15, -0.05, 0.05, 0.15]),
            "b2": np.array([0.1, -0.2]),
        },
        0.0,
        2.0,
        {"target": np.array([0.3, 0.4])},
    )


def slow_fast(K: float = 20.0, t1: float = 1.0) -> ProblemData:
    """A contracting fast variable tied to a slow one: rebuilding y backward amplifies errors.

    y1' = -K (y1 - cos y2), y2' = -y2 + c y1, L = (y2(T) - 1)^2.
    """
    return ProblemData(
        "slow_fast",
        np.array([2.0, 1.0]),
        {"K": np.array(K), "c": np.array(1.0)},
        0.0,
        t1,
        {"target": np.array(1.0)},
    )


def van_der_pol(mu: float = 5.0, t1: float = 1.0) -> ProblemData:
    """Van der Pol's oscillator: x' = v, v' = mu (1 - x^2) v - x, L = x(T)^2 + v(T)^2 / 2."""
    return ProblemData("van_der_pol", np.array([2.0, 0.0]), {"mu": np.array(mu)}, 0.0, t1)


def driven() -> ProblemData:
    """Driven pendulum, nonlinear with explicit time: x' = v, v' = -b v - k sin x + g cos 2t.

    L = (x(T) - 0.2)^2 + v(T)^2 / 2.
    """
    return ProblemData(
        "driven",
        np.array([1.0, 0.5]),
        {"b": np.array(0.3), "g": np.array(0.8), "k": np.array(2.0)},
        0.0,
        3.0,
        {"target": np.array(0.2)},
    )


def hare_lynx() -> ProblemData:
    """Lotka-Volterra in logarithms, fitted to the Hudson's Bay Company's pelt counts, 1900-1920.

    u' = alpha - beta e^v, v' = -gamma + delta e^u; L = sum of squared log residuals over the 21
    years and both species. The table and its source are in hare_lynx.csv beside this file.
    """
    text = files("contadj.problems").joinpath("hare_lynx.csv").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line and not line.startswith("#")]
    table = np.loadtxt(StringIO("\n".join(rows[1:])), delimiter=",")
    years, pelts = table[:, 0] - table[0, 0], table[:, 1:]
    return ProblemData(
        "hare_lynx",
        np.log(pelts[0]),
        {
            "alpha": np.array(0.55),
            "beta": np.array(0.028),
            "delta": np.array(0.024),
            "gamma": np.array(0.8),
        },
        float(years[0]),
        float(years[-1]),
        {"log_pelts": np.log(pelts)},
        observation_times=tuple(map(float, years)),
    )


BUILT_IN: dict[str, Callable[..., ProblemData]] = {
    make.__name__: make
    for make in (lin, nonaut, pend, driven, mlp, slow_fast, van_der_pol, hare_lynx)
}


def problem_data(name: str, **options: float) -> ProblemData:
    """Return the numbers of a built-in problem.

    Parameters
    ----------
    name : str
        One of the keys of `BUILT_IN`.
    **options : float
        The problem's own options, `K` and `t1` of `slow_fast` for instance.

    Raises
    ------
    ValueError
        If there is no problem of that name.
    """
    if name not in BUILT_IN:
        raise ValueError(f"`problem` must be one of {', '.join(BUILT_IN)}; got {name!r}")
    return BUILT_IN[name](**options)
