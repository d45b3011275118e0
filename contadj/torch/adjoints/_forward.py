"""The discrete gradient in forward mode, for few parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._field import pull
from .._steps import Step, host_time, product
from ._base import Adjoint, Integration, time_leaf


@dataclass(frozen=True)
class ForwardSensitivity(Adjoint):
    """The discrete gradient, exact, by carrying tangents along with the solve.

    For each entry x of y0, the parameters and t that needs a gradient, S_n = dy_n/dx obeys

        S_{n+1} = (dPhi_n/dy) S_n + dPhi_n/dx,

    Phi_n the step that was taken. Nothing is stored for a backward pass; work and memory grow with
    the number of entries, so it is for few of them. The mesh of error control is frozen.

    References
    ----------
    Hairer, Norsett & Wanner, Solving Ordinary Differential Equations I, II.6 (1993),
    doi:10.1007/978-3-540-78862-1.
    """

    def solve(
        self, integration: Integration, y0: Tensor, t: Tensor, params: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Solve with tangents; autograd contracts them."""
        inputs = tuple(x for x in (y0, t, *params) if x.requires_grad)
        if not torch.is_grad_enabled() or not inputs:
            inputs = ()
        with torch.no_grad():
            tangents = _Tangents(integration, y0, t, params, inputs)
            outputs, jacobians = tangents.run()
        if not inputs:
            return outputs
        return _Contract.apply(outputs, jacobians, *inputs)


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, jacobians, *inputs):  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            *inputs, *(jacobian for jacobian in jacobians if jacobian is not None)
        )
        ctx.present = [jacobian is not None for jacobian in jacobians]
        ctx.count = len(inputs)
        return outputs

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "ForwardSensitivity has no second derivative: use CheckpointAdjoint() or "
                "DirectAdjoint() with create_graph=True"
            )
        inputs, saved = ctx.saved_tensors[: ctx.count], iter(ctx.saved_tensors[ctx.count :])
        jacobians = [next(saved) if there else None for there in ctx.present]
        total = None
        for grad, jacobian in zip(grads, jacobians, strict=True):
            if grad is None or jacobian is None:
                continue
            # sum over the output of conj(tangent) times cotangent
            part = product(jacobian.reshape(len(jacobian), -1).conj(), grad.flatten())
            total = part if total is None else total + part
        if total is None:
            return (None, None, *[None] * len(inputs))
        parts = total.split([_directions(x) for x in inputs])
        return (None, None, *[_gather(p, x) for p, x in zip(parts, inputs, strict=True)])


def _directions(x: Tensor) -> int:
    """Number of real directions of a tensor."""
    return x.numel() * (2 if x.is_complex() else 1)


def _gather(part: Tensor, x: Tensor) -> Tensor:
    """The gradient of a tensor from its derivative along each real direction."""
    if x.is_complex():
        real, imaginary = part.real.reshape(2, *x.shape)
        return torch.complex(real, imaginary).to(x)
    return part.real.reshape(x.shape).to(x)


class _Tangents:
    """A solve whose outputs come with their derivatives along K directions, (K, *output)."""

    def __init__(
        self,
        integration: Integration,
        y0: Tensor,
        t: Tensor,
        params: tuple[Tensor, ...],
        inputs: tuple[Tensor, ...],
    ):
        self.integration, self.y0, self.t = integration, y0.detach(), t
        self.params = params if inputs else ()
        self.watched = params if inputs else None
        self.moving_times = any(x is t for x in inputs)
        self.count = sum(_directions(x) for x in inputs)
        self.columns: dict[int, slice] = {}
        start = 0
        for x in inputs:
            self.columns[id(x)] = slice(start, start + _directions(x))
            start += _directions(x)
        self.y_tangent = self._basis(y0, self.y0)
        self.param_tangents = [self._basis(param, param) for param in self.params]

    def _basis(self, x: Tensor, like: Tensor) -> Tensor:
        """The tangents of an input: unit vectors in its own columns, (K, *shape)."""
        tangent = torch.zeros(self.count, *like.shape, dtype=like.dtype, device=like.device)
        columns = self.columns.get(id(x))
        if columns is None:
            return tangent
        unit = torch.eye(like.numel(), dtype=like.dtype, device=like.device)
        if like.is_complex():
            unit = torch.cat([unit, 1j * unit])
        tangent[columns] = unit.reshape(len(unit), *like.shape)
        return tangent

    def run(self):
        """(ys, cost, loss), and their derivatives along the directions."""
        integration = self.integration
        mesh_times = self._time_tangents()
        y, tangent = self.y0, self.y_tangent
        rows: list[tuple[list[Tensor], list[Tensor]]] = []
        for n, found in enumerate(integration.steps(y)):
            start, end = host_time(found.t), host_time(found.t_next)
            indices = integration.observed(start, end)
            outs, tangents = self._advance(y, tangent, n, start, end, indices, mesh_times, found)
            y, tangent = outs.pop(0), tangents.pop(0)
            rows.append((outs, tangents))
        last = len(integration.times) - 1
        rows.append(self._end(y, tangent, last))
        return self._collect(rows)

    def _time_tangents(self):
        """Derivatives of the step times and the observation times, (K, N + 1) and (K, T)."""
        if not self.moving_times:
            return None
        integration = self.integration
        mesh = integration.mesh
        columns = self.columns[id(self.t)]
        observed = torch.zeros(self.count, len(integration.times), dtype=torch.float64)
        observed[columns] = torch.eye(len(integration.times), dtype=torch.float64)
        if not hasattr(mesh, "differentiable"):
            return None, observed
        steps = torch.zeros(self.count, len(mesh.times), dtype=torch.float64)  # type: ignore[union-attr]
        with torch.enable_grad():
            leaf = self.t.detach().double().requires_grad_()
            jacobian = torch.autograd.functional.jacobian(mesh.differentiable, leaf)  # type: ignore[union-attr]
        steps[columns] = jacobian.T.cpu()  # type: ignore[union-attr]
        return steps, observed

    def _advance(self, y, tangent, n, start, end, indices, mesh_times, found: Step):
        integration = self.integration
        with integration.again(self.watched), torch.enable_grad():
            leaf = y.detach().requires_grad_()
            inputs, tangents = [leaf, *self.params], [tangent, *self.param_tangents]
            times = None
            if mesh_times is None:
                step = integration.method.take(integration.f, start, end, leaf)
            else:
                ends = [time_leaf(start), time_leaf(end)]
                times = {i: time_leaf(float(integration.times[i])) for i in indices}
                step = integration.method.take(integration.f, ends[0], ends[1], leaf)
                inputs += [*ends, *times.values()]
                tangents += self._step_time_tangents(mesh_times, n, start, end)
                tangents += [mesh_times[1][:, i] for i in indices]
            outs = [step.y_next]
            if integration.running_cost is not None:
                outs.append(integration.method.quadrature(integration.running_cost, step))
            if indices:
                states = integration.observe(step, indices, times)  # type: ignore[arg-type]
                if integration.loss is not None:
                    states = integration.losses(indices, states, times)  # type: ignore[arg-type]
                outs.append(states)
            derivatives = _push_forward(outs, inputs, tangents, self.count)
        return [out.detach() for out in outs], derivatives

    def _step_time_tangents(self, mesh_times, n: int, start: float, end: float) -> list[Tensor]:
        steps, observed = mesh_times
        if steps is not None:
            return [steps[:, n], steps[:, n + 1]]
        # A mesh found by error control is frozen but for its ends.
        still = observed.new_zeros(self.count)
        times = self.integration.times
        return [
            observed[:, 0] if start == times[0] else still,
            observed[:, -1] if end == times[-1] else still,
        ]

    def _end(self, y: Tensor, tangent: Tensor, last: int):
        integration = self.integration
        if integration.loss is None:
            return [y[None]], [tangent[:, None]]
        with integration.again(self.watched), torch.enable_grad():
            leaf = y.detach().requires_grad_()
            inputs, tangents = [leaf, *self.params], [tangent, *self.param_tangents]
            times = None
            if self.moving_times:
                times = {last: time_leaf(float(integration.times[last]))}
                inputs.append(times[last])
                unit = torch.zeros(self.count, dtype=torch.float64)
                unit[self.columns[id(self.t)].start + last] = 1.0
                tangents.append(unit)
            value = integration.losses([last], leaf[None], times)  # type: ignore[arg-type]
            derivative = _push_forward([value], inputs, tangents, self.count)
        return [value.detach()], derivative

    def _collect(self, rows):
        integration = self.integration
        paying = integration.running_cost is not None
        cost = d_cost = None
        if paying:
            cost = _sum(outs[0] for outs, _ in rows[:-1])
            d_cost = _sum(tangents[0] for _, tangents in rows[:-1])
        seen = [
            (outs[-1], tangents[-1])
            for k, (outs, tangents) in enumerate(rows)
            if len(outs) > (paying and k < len(rows) - 1)
        ]
        if integration.loss is not None:
            loss, d_loss = (_sum(column) for column in zip(*seen, strict=True))
            return (None, cost, loss), (None, d_cost, d_loss)
        ys = torch.cat([out for out, _ in seen])
        d_ys = torch.cat([tangent for _, tangent in seen], dim=1)
        return (ys, cost, None), (d_ys, d_cost, None)


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)


def _push_forward(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor], count: int
) -> list[Tensor]:
    """Derivatives of `outs` along K tangents of `inputs`, (K, *out) each.

    A vector-Jacobian product is linear in its cotangent u; its own vector-Jacobian product with the
    tangents, with respect to u, is the Jacobian-vector product.
    """
    zero = [out.new_zeros(count, *out.shape) for out in outs]
    live = [k for k, out in enumerate(outs) if out.requires_grad]
    if count == 0 or not live:
        return zero
    dummies = [torch.zeros_like(outs[k], requires_grad=True) for k in live]
    pulled = pull([outs[k] for k in live], dummies, inputs, create_graph=True)
    pairs = [
        (back, tangent)
        for back, tangent in zip(pulled, tangents, strict=True)
        if back is not None and back.requires_grad
    ]
    if not pairs:
        return zero
    backs, directions = [back for back, _ in pairs], [tangent for _, tangent in pairs]
    pushed = pull(backs, directions, dummies, is_grads_batched=True)
    for k, derivative in zip(live, pushed, strict=True):
        if derivative is not None:
            zero[k] = derivative
    return zero
