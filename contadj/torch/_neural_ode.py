"""A solve as a layer: y(t_1) from y(t_0), with the parameters of its vector field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from . import _tree
from ._errors import SolveStats
from ._solve import solve
from .adjoints import Adjoint

RETURNS = ("last", "all")


class NeuralODE(nn.Module):
    """The solution of y' = func(t, y), y(t_0) = y0, as a module.

    Its parameters are those of `func`; it trains, moves and is saved like any other module.

    Parameters
    ----------
    func : nn.Module or callable
        The vector field func(t, y); a callable that is no module has no parameters to register.
    method, adjoint, rtol, atol, options, params, engine, compile
        As in `contadj.torch.solve`.
    times : sequence of float
        Observation times of a forward call without `t`.
    returns : "last" or "all"
        The state at the last observation time, or at all of them.

    Attributes
    ----------
    stats : SolveStats or None
        Statistics of the last forward call; those of its backward pass are there after it.

    Raises
    ------
    TypeError
        If `func` is not callable.
    ValueError
        For an unknown value of `returns`.

    References
    ----------
    Chen, Rubanova, Bettencourt & Duvenaud 2018, Neural ordinary differential equations,
    arXiv:1806.07366.
    """

    stats: SolveStats | None

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        method: str | None = None,
        adjoint: Adjoint | None = None,
        rtol: Any = 1e-7,
        atol: Any = 1e-9,
        options: Mapping[str, Any] | None = None,
        params: Sequence[Tensor] | None = None,
        engine: str | None = None,
        compile: bool = False,
        times: Sequence[float] = (0.0, 1.0),
        returns: str = "last",
    ):
        super().__init__()
        if not callable(func):
            raise TypeError(f"`func` must be callable as func(t, y), got {type(func).__name__}")
        if returns not in RETURNS:
            raise ValueError(f"`returns` must be 'last' or 'all', got {returns!r}")
        self.func = func
        self.times = tuple(float(time) for time in times)
        self.returns = returns
        self.stats = None
        self._settings = {
            "method": method, "adjoint": adjoint, "rtol": rtol, "atol": atol, "options": options,
            "params": params, "engine": engine, "compile": compile,
        }  # fmt: skip

    def forward(
        self, y0: Float[Tensor, "*state"] | Any, t: Float[Tensor, " time"] | None = None
    ) -> Float[Tensor, "*state"] | Float[Tensor, " time *state"] | Any:
        """Solve from y0.

        Parameters
        ----------
        y0 : (*state) tensor, or tuple, list or dict of tensors
        t : (T,) tensor, optional
            Observation times; `times` by default.

        Returns
        -------
        (*state) or (T, *state) tensor, or the structure of y0 with such tensors
        """
        if t is None:
            t = torch.tensor(self.times, dtype=torch.float64)
        solution = solve(self.func, y0, t, **self._settings)
        self.stats = solution.stats
        if self.returns == "all":
            return solution.ys
        return _tree.tree_map(lambda ys: ys[-1], solution.ys)

    def extra_repr(self) -> str:
        """The settings that are not the defaults."""
        shown = {name: value for name, value in self._settings.items() if value is not None}
        shown.update(times=self.times, returns=self.returns)
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())
