"""The built-in problems' vector fields and costs, in PyTorch; their numbers are in
`contadj.problems`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..problems import GradientProblem, ProblemData, problem_data

Params = dict[str, Any]


def _lin(t, y, p: Params):
    return p["a"] * y + p["theta"]


def _nonaut(t, y, p: Params):
    return torch.cos(t) * y + p["theta"]


def _pend(t, y, p: Params):
    x, v = y.unbind()
    return torch.stack([v, -p["b"] * v - p["k"] * torch.sin(x)])


def _pend_running_cost(t, y, p: Params):
    x, v = y.unbind()
    return x**2 + 0.1 * v**2


def _driven(t, y, p: Params):
    x, v = y.unbind()
    return torch.stack([v, -p["b"] * v - p["k"] * torch.sin(x) + p["g"] * torch.cos(2 * t)])


def _mlp(t, y, p: Params):
    return p["W2"] @ torch.tanh(p["W1"] @ y + p["b1"]) + p["b2"]


def _slow_fast(t, y, p: Params):
    y1, y2 = y.unbind()
    return torch.stack([-p["K"] * (y1 - torch.cos(y2)), -y2 + p["c"] * y1])


def _van_der_pol(t, y, p: Params):
    x, v = y.unbind()
    return torch.stack([v, p["mu"] * (1 - x**2) * v - x])


def _hare_lynx(t, y, p: Params):
    u, v = y.unbind()
    return torch.stack([
        p["alpha"] - p["beta"] * torch.exp(v), -p["gamma"] + p["delta"] * torch.exp(u)
    ])  # fmt: skip


def _constant(data: ProblemData, name: str, y: Tensor) -> Tensor:
    return torch.as_tensor(data.constants[name], dtype=y.dtype, device=y.device)


def _distance(y, p, *, data):
    return ((y - _constant(data, "target", y)) ** 2).sum()


def _half_distance(y, p, *, data):
    return 0.5 * _distance(y, p, data=data)


def _pend_end(y, p, *, data):
    return (y[0] - _constant(data, "target", y)) ** 2 + 0.5 * y[1] ** 2


def _slow_end(y, p, *, data):
    return (y[1] - _constant(data, "target", y)) ** 2


def _van_der_pol_end(y, p, *, data):
    return y[0] ** 2 + 0.5 * y[1] ** 2


def _misfit(i, t, y, p, *, data):
    return ((y - _constant(data, "log_pelts", y)[i]) ** 2).sum()


_FIELDS: dict[str, tuple[Callable, dict[str, Callable]]] = {
    "lin": (_lin, {"terminal_cost": _distance}),
    "nonaut": (_nonaut, {"terminal_cost": _distance}),
    "pend": (_pend, {"terminal_cost": _pend_end}),
    "driven": (_driven, {"terminal_cost": _pend_end}),
    "mlp": (_mlp, {"terminal_cost": _half_distance}),
    "slow_fast": (_slow_fast, {"terminal_cost": _slow_end}),
    "van_der_pol": (_van_der_pol, {"terminal_cost": _van_der_pol_end}),
    "hare_lynx": (_hare_lynx, {"observation_cost": _misfit}),
}
_RUNNING_COSTS = {"pend": _pend_running_cost}


def builtin_problem(name: str, **options: float) -> GradientProblem:
    """Return a built-in problem, its vector field and costs written in PyTorch.

    Parameters
    ----------
    name : str
        One of `contadj.problems.BUILT_IN`.
    **options : float
        The problem's own options, as in `contadj.problems.problem_data`.

    Returns
    -------
    GradientProblem

    Raises
    ------
    ValueError
        If there is no problem of that name.
    """
    data = problem_data(name, **options)
    field, costs = _FIELDS[name]
    return GradientProblem(
        name,
        "torch",
        field,
        data.y0,
        dict(data.params),
        data.t0,
        data.t1,
        running_cost=_RUNNING_COSTS.get(name),
        observation_times=data.observation_times,
        gradient=data.gradient,
        adjoint=data.adjoint,
        **{kind: partial(cost, data=data) for kind, cost in costs.items()},
    )
