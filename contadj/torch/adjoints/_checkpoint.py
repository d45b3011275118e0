"""The discrete gradient from stored states: one step recomputed and pulled back at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...checkpointing import OfflineSnapshots, OnlineSnapshots, check_count, walk_back
from .._compile import CompiledRungeKutta
from .._field import pull
from .._mesh import Mesh
from .._steps import Step, host_time, product, replay_evidence
from ._base import (
    Integration,
    Outputs,
    Recorded,
    ReplayingAdjoint,
    accumulate,
    check_replay,
    stage_times,
    time_leaf,
)


@dataclass(frozen=True)
class CheckpointAdjoint(ReplayingAdjoint):
    """The discrete gradient, exact, from the states of the accepted steps.

    lambda_n = (dPhi_n/dy)^T lambda_{n+1} + dC/dy_n and dL/dtheta = sum_n (dPhi_n/dtheta)^T
    lambda_{n+1}, Phi_n the step that was taken: each is evaluated once more and its vector-Jacobian
    product taken. Equal to `DirectAdjoint` up to rounding. Rejected steps are never touched.

    Parameters
    ----------
    snapshots : int, optional
        None stores every state, N |y|. K stores K states and repeats steps: on a given mesh with
        the optimal binomial schedule, on an adaptive one with an online schedule.

    References
    ----------
    Griewank & Walther 2000, Algorithm 799: revolve, doi:10.1145/347837.347846.
    """

    snapshots: int | None = None

    def __post_init__(self) -> None:
        check_count("snapshots", self.snapshots)

    def forward(self, integration: Integration, y0: Tensor):
        """Solve, keeping states or snapshots of them."""
        outputs = Outputs(integration)
        if self.snapshots is not None and isinstance(integration.mesh, Mesh):
            store = OfflineSnapshots(len(integration.mesh.times) - 1, self.snapshots)
            steps = integration.steps(y0)

            def take(y: Tensor, n0: int, n1: int) -> Tensor:
                for _ in range(n1 - n0):
                    step = next(steps)
                    outputs.take(step)
                    y = step.y_next
                return y

            y = store.forward(y0, take)
            next(steps, None)  # lets the generator record the evaluations
            return outputs.finish(y).tensors(), [y], (integration.mesh, store)
        online = None if self.snapshots is None else OnlineSnapshots(self.snapshots)
        states: list[Tensor] = []
        ends: list[float] = []
        y = y0
        for step in integration.steps(y0):
            if online is None:
                states.append(step.y)
            else:
                online.offer(step.y)
            ends.append(host_time(step.t_next))
            outputs.take(step)
            y = step.y_next
        mesh = integration.mesh
        if not isinstance(mesh, Mesh):
            mesh = Mesh.found(integration.times[0], ends)
        return outputs.finish(y).tensors(), [*states[1:], y], (mesh, online)

    def backward(self, integration: Integration, recorded: Recorded):
        """Walk the mesh once in reverse."""
        mesh, store = recorded.notes
        sweep = _Sweep(integration, recorded, mesh)
        sweep.start(recorded.tensors[-1])
        if store is None:
            states = [recorded.y0, *recorded.tensors]
            n = sweep.num_steps
            while n > 0:
                count = sweep.together(n)
                n -= count
                sweep.reverse(n, states[n], count)
        else:
            walk_back(store, recorded.y0, sweep.advance, sweep.reverse)
        return sweep.gradients()

    def differentiable_backward(self, integration: Integration, recorded: Recorded):
        """The same gradient with a graph: the frozen mesh is walked with one, then pulled back."""
        (mesh, _), t, cotangents = recorded.notes, recorded.t, recorded.cotangents
        times = t.to("cpu", torch.float64) if t.requires_grad else None
        points = mesh.differentiable(t).unbind() if t.requires_grad else mesh.times.tolist()
        outputs = Outputs(integration)
        y = recorded.y0
        for start, end in pairwise(points):
            step = integration.method.take(integration.f, start, end, y)
            outputs.take(step, times)
            y = step.y_next
        results = outputs.finish(y, times).tensors()
        given = cotangents.ys, cotangents.cost, cotangents.loss
        pairs = [pair for pair in zip(results, given, strict=True) if pair[0] is not None]
        sources = (recorded.y0, t, *recorded.params)
        inputs = [x for x in sources if x.requires_grad]
        grads = iter(pull(*zip(*pairs, strict=True), inputs, create_graph=True))  # pyright: ignore
        all_grads = [next(grads) if x.requires_grad else None for x in sources]
        return all_grads[0], all_grads[1], all_grads[2:]


class _Sweep:
    """The discrete adjoint recursion over a frozen mesh."""

    def __init__(self, integration: Integration, recorded: Recorded, mesh: Mesh):
        self.integration = integration
        self.mesh = mesh
        self.num_steps = len(mesh.times) - 1
        self._times = mesh.times.tolist()
        self._y0, t = recorded.y0, recorded.t
        self._params, self._cotangents = recorded.params, recorded.cotangents
        self._t = t if t.requires_grad else None
        self._param_grads: list[Tensor | None] = [None] * len(self._params)
        if self._t is not None:
            self._time_grads = torch.zeros(self.num_steps + 1, dtype=torch.float64)
            self._observation_grads = torch.zeros(len(integration.times), dtype=torch.float64)
        self._y_end: Tensor | None = None

    def start(self, y: Tensor) -> None:
        """Begin at the last observation time."""
        self._y_end = y
        last = len(self.integration.times) - 1
        cotangent = self._cotangents.of_observations(self.integration, [last])
        if cotangent is not None and self.integration.loss is None:
            self.adjoint = cotangent[0]
            return
        self.adjoint = torch.zeros_like(y)
        if cotangent is None:
            return
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            time = None
            if self._t is not None:
                time = time_leaf(float(self.integration.times[last]))
            times = None if time is None else {last: time}
            value = self.integration.losses([last], y[None], times)  # type: ignore[arg-type]
        self._pull([value], [cotangent], y, [] if time is None else [time])
        if time is not None:
            self._observation_grads[last] += self._last_time_grads[0]

    def advance(self, y: Tensor, n0: int, n1: int) -> Tensor:
        """Repeat steps n0, ..., n1 - 1 without a graph."""
        with torch.no_grad():
            first = None
            for n in range(n0, n1):
                step = self._step(n, y, first)
                y = step.y_next
        return y

    def _step(self, n: int, y: Tensor, first: Tensor | None = None) -> Step:
        return self.integration.method.take(
            self.integration.f, self._times[n], self._times[n + 1], y, times=self._table[n],
            first=first,
        )  # fmt: skip

    def reverse(self, n: int, y: Tensor, count: int = 1) -> None:
        """lambda_n from lambda_{n+count}, given y_n."""
        integration, cotangents = self.integration, self._cotangents
        start, end = self._times[n], self._times[n + count]
        indices = integration.observed(start, end)
        if self._runs_compiled(n, n + count):
            self._reverse_compiled(n, count, y, indices)
            return
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            if self._t is None:
                times, leaves = None, []
                step = self._step(n, y)
            else:
                leaves = [time_leaf(x) for x in (start, end)]
                times = {i: time_leaf(float(integration.times[i])) for i in indices}
                step = integration.method.take(integration.f, leaves[0], leaves[1], y)
            self._check_replay(y.detach(), step.y_next.detach())
            outs, cots = [step.y_next], [self.adjoint]
            if integration.running_cost is not None and cotangents.cost is not None:
                outs.append(integration.method.quadrature(integration.running_cost, step))
                cots.append(cotangents.cost)
            cotangent = cotangents.of_observations(integration, indices) if indices else None
            if cotangent is not None:
                states = integration.observe(step, indices, times)  # type: ignore[arg-type]
                if integration.loss is not None:
                    states = integration.losses(indices, states, times)  # type: ignore[arg-type]
                outs.append(states)
                cots.append(cotangent)
        self.adjoint = torch.zeros_like(self.adjoint)
        self._pull(outs, cots, y, [*leaves, *(times or {}).values()])
        if self._t is not None:
            ends, observed = self._last_time_grads[:2], self._last_time_grads[2:]
            self._time_grads[n] += ends[0]
            self._time_grads[n + 1] += ends[1]
            for i, grad in zip(indices, observed, strict=True):
                self._observation_grads[i] += grad

    def together(self, n: int) -> int:
        """How many of the steps before t_n are pulled back in one call."""
        block = getattr(self.integration.method, "block", 1)
        return block if n >= block and self._runs_compiled(n - block, n) else 1

    def _runs_compiled(self, n: int, end: int) -> bool:
        """Whether a compiled vector-Jacobian product serves steps n, ..., end - 1."""
        integration = self.integration
        return (
            isinstance(integration.method, CompiledRungeKutta)
            and self._t is None
            and integration.loss is None
            and (integration.method.interpolates or not self._inside[n:end].any())
        )

    @cached_property
    def _inside(self) -> NDArray[np.bool_]:
        """Whether an observation lies inside a step, not only at its start, by step."""
        direction, times = self.integration.direction, self.integration.times
        steps = np.searchsorted(direction * self.mesh.times, direction * times, side="right") - 1
        inside = np.zeros(self.num_steps + 1, dtype=bool)
        inside[steps[self.mesh.times[steps] != times]] = True
        return inside

    @cached_property
    def _observations(self) -> tuple[Tensor, Tensor] | None:
        """The observation times and dL/dy there, as steps pulled back together take them."""
        method, cotangent = self.integration.method, self._cotangents.ys
        observed = method.observed if isinstance(method, CompiledRungeKutta) else None
        if observed is None or cotangent is None:
            return None
        padded = cotangent.new_zeros(len(observed), *cotangent.shape[1:])
        padded[: len(cotangent)] = cotangent
        return observed, padded

    @cached_property
    def _points(self) -> Tensor:
        """The step times."""
        return torch.from_numpy(self.mesh.times).to(self._y0.device)

    @cached_property
    def _table(self) -> Tensor:
        """The stage times."""
        return stage_times(self.integration.method, self.mesh.times, self._y0)

    def _reverse_compiled(self, n: int, count: int, y: Tensor, indices: range) -> None:
        integration, method = self.integration, self.integration.method
        assert isinstance(method, CompiledRungeKutta)
        times, starts = integration.times[indices.start : indices.stop], self._times[n : n + count]
        dense = len(indices) > count or any(time not in starts for time in times.tolist())
        seen, slopes, observations = None, None, None
        if self._observations is not None:
            observations = self._observations
        elif indices:
            # The dense output is linear in y and the slopes.
            seen = self._cotangents.of_observations(integration, indices)
            if seen is not None and dense:
                weights = method.dense_weights(self._times[n], self._times[n + 1], times)
                weights = torch.from_numpy(weights).to(y.device, y.dtype)
                slopes = product(weights.mT, seen)
        totals = [total for total in self._param_grads if total is not None]
        # A sum inside costs a second compiled function, which small parameters do not repay.
        inside = method.block == 1
        expected, self._y_end = self._y_end, None
        evidence, self.adjoint, grads = method.pull_back(
            integration.f, self._points[n : n + count + 1], y, y if expected is None else expected,
            self.adjoint, (totals or None) if inside else None, slope_cotangents=slopes,
            observations=observations, dense=dense,
        )  # fmt: skip
        if seen is not None:
            self.adjoint = self.adjoint + seen.sum(0)
        if inside or not totals:
            self._param_grads = list(grads)
        else:
            accumulate(self._param_grads, grads)
        if expected is not None:
            check_replay(integration, evidence, y.dtype)

    def _pull(self, outs: list, cots: list, y: Tensor, leaves: list) -> None:
        """Add the vector-Jacobian products of `outs` to the adjoint and the gradients."""
        grads = pull(outs, cots, (y, *leaves, *self._params))
        if grads[0] is not None:
            self.adjoint = self.adjoint + grads[0]
        count = 1 + len(leaves)
        self._last_time_grads = [0.0 if grad is None else grad for grad in grads[1:count]]
        accumulate(self._param_grads, grads[count:])

    def _check_replay(self, y: Tensor, y_next: Tensor) -> None:
        """The first step taken again must give the state that the forward pass stored."""
        expected, self._y_end = self._y_end, None
        if expected is not None:
            check_replay(self.integration, replay_evidence(y, y_next, expected), y.dtype)

    def gradients(self):
        """dL/dy0, dL/dt, dL/dparams."""
        grad_t = None
        if self._t is not None:
            grad_t = self.mesh.pullback(self._t, self._time_grads, self._observation_grads)
        return self.adjoint, grad_t, self._param_grads
