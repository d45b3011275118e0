"""Memory and work: bytes against the number of steps, and error against seconds and bytes.

A neural ODE, y' = W2 tanh(W1 y + b1) + b2 on 256 samples of 4 numbers with 16 hidden units, in
float64, L = sum y(T)^2 / 512; its gradient in the 148 parameters by every adjoint of contadj and by
those of torchdiffeq, torchode and Diffrax.

On a fixed mesh of N steps of heun2, with |y| = 8 KiB the size of the state, the peak of live bytes
is expected to grow as the design of each adjoint says (`GROWTH`, `growth`):

- "constant": rebuilt states (backsolve, reversible), forward mode, or a fixed number of snapshots.
  What may grow are step times, 8 bytes a step.
- "states": one state a step and no activations, N |y|.
- "root": Diffrax's recursive checkpointing keeps the smallest c with (c + 1)(c + 2) / 2 >= N
  states, about sqrt(2 N) (Stumm & Walther 2010, doi:10.1137/080742439; Diffrax's default). XLA
  gives them room twice, and until they need more than one step does, it does not show: the order is
  reached from N = 1024 on.
- "logarithm": Diffrax's DirectAdjoint is a tree of loops of 16 that keep the 16 states at which
  their branches start, and activations in the 16 steps of the last loop only.
- "activations": two evaluations a step, and each keeps tanh's output, four states, and its own
  input: at least 8 |y| a step.

What is constant has bytes of order 0 in 1/N, and the growth of a logarithm is 16 |y| for each
factor of 16: nearly 0. What grows has increments, from each mesh to the next, of order -1, -1/2 for
the root. States and activations differ by bytes a step. In PyTorch bytes are those of
`contadj.torch.peak_live_bytes`, in JAX those that XLA gives the compiled gradient beside its inputs
and outputs.

Adaptive solves by dopri5 at several tolerances give error against seconds; a fixed mesh gives error
against bytes. Seconds are the median of repeated gradients, one thread, compilation left out. An
error is held against the adjoint ODE, its vector-Jacobian products written by hand and solved by
SciPy's DOP853 at 1e-12.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
from pydantic import Field, field_validator
from scipy.integrate import solve_ivp

from ..config import Settings as BaseSettings
from ..config import Steps
from ..figures import Slope
from ..orders import ExpectedOrder
from ..problems._problem import Array

SOURCES = ()
BATCH, DIM, HIDDEN, T1 = 256, 4, 16, 2.0
STATE_BYTES = 8 * BATCH * DIM
SNAPSHOTS = 16
ORDERS = {"constant": 0.0, "logarithm": 0.0, "root": -0.5, "states": -1.0, "activations": -1.0}
GROWTH = {
    "contadj.torch.DirectAdjoint": "activations",
    "contadj.torch.CheckpointAdjoint": "states",
    f"contadj.torch.CheckpointAdjoint({SNAPSHOTS})": "constant",
    "contadj.torch.ReversibleAdjoint": "constant",
    "contadj.torch.BacksolveAdjoint": "constant",
    "contadj.torch.InterpolatingAdjoint": "states",
    "contadj.torch.GaussAdjoint": "states",
    "contadj.torch.ForwardSensitivity": "constant",
    "torchdiffeq.odeint": "activations",
    "torchdiffeq.odeint_adjoint": "constant",
    "torchode.AutoDiffAdjoint": "activations",
    "torchode.BacksolveAdjoint": "constant",
    "torchode.JointBacksolveAdjoint": "constant",
    "contadj.jax.DirectAdjoint": "logarithm",
    "contadj.jax.CheckpointAdjoint": "states",
    f"contadj.jax.CheckpointAdjoint({SNAPSHOTS})": "constant",
    "contadj.jax.ReversibleAdjoint": "constant",
    "contadj.jax.BacksolveAdjoint": "constant",
    "contadj.jax.InterpolatingAdjoint": "states",
    "contadj.jax.GaussAdjoint": "states",
    "contadj.jax.ForwardSensitivity": "constant",
    "diffrax.RecursiveCheckpointAdjoint": "root",
    "diffrax.BacksolveAdjoint": "constant",
}
ADJOINTS = tuple(GROWTH)
# In figures: contadj's are named alike in both backends, the libraries' own follow.
_OURS = {
    "DirectAdjoint": "Direct",
    "CheckpointAdjoint": "Checkpoint",
    f"CheckpointAdjoint({SNAPSHOTS})": f"Checkpoint, {SNAPSHOTS} snapshots",
    "InterpolatingAdjoint": "Interpolating",
    "GaussAdjoint": "Gauss",
    "ReversibleAdjoint": "Reversible",
    "BacksolveAdjoint": "Backsolve",
    "ForwardSensitivity": "ForwardSensitivity",
}
_PEERS = {
    "torchdiffeq.odeint": "torchdiffeq odeint",
    "torchdiffeq.odeint_adjoint": "torchdiffeq odeint_adjoint",
    "torchode.AutoDiffAdjoint": "torchode AutoDiff",
    "torchode.BacksolveAdjoint": "torchode Backsolve",
    "torchode.JointBacksolveAdjoint": "torchode JointBacksolve",
    "diffrax.RecursiveCheckpointAdjoint": "Diffrax RecursiveCheckpoint",
    "diffrax.BacksolveAdjoint": "Diffrax Backsolve",
}
LABELS = (*_OURS.values(), *_PEERS.values())
# Relative errors of the gradient below which rounding and the reference's own error count.
FLOOR = 1e-11
# Room for steps of an adaptive solve in JAX, where buffers have a fixed size.
MAX_STEPS = 256


class Settings(BaseSettings):
    """What the study of memory and work covers.

    Parameters
    ----------
    adjoints : tuple of str
        Of `ADJOINTS`, the module or library in front, the number of snapshots behind.
    steps : tuple of int
        Numbers of steps of the fixed mesh.
    steps_of : dict of str to tuple of int
        Other numbers of steps for the adjoints named.
    finest_of : dict of str to float
        The smallest tolerance of the adjoints named.
    tolerances : tuple of float
        rtol = atol of the adaptive solves.
    repeats : int
        Gradients that are timed after a first one; none where that took two seconds, fewer where
        they take one in all.
    """

    adjoints: Annotated[tuple[str, ...], Field(min_length=1)] = ADJOINTS
    steps: Steps = (16, 64, 256, 1024)
    steps_of: dict[str, Steps] = Field(default={})
    finest_of: dict[str, float] = Field(default={})
    tolerances: tuple[float, ...] = (1e-3, 1e-5, 1e-7, 1e-9)
    repeats: Annotated[int, Field(ge=1)] = 5

    @field_validator("adjoints")
    @classmethod
    def _known(cls, adjoints: tuple[str, ...]) -> tuple[str, ...]:
        for one in adjoints:
            if one not in ADJOINTS:
                raise ValueError(f"must be of {', '.join(ADJOINTS)}")
        return adjoints


def cells(settings: Settings) -> list[list[dict[str, Any]]]:
    """Return two groups per adjoint: on fixed meshes of N steps, and at tolerances."""
    groups = []
    for adjoint in settings.adjoints:
        place = {"adjoint": adjoint, "repeats": settings.repeats}
        steps = sorted(settings.steps_of.get(adjoint, settings.steps))
        groups.append([place | {"mesh": "fixed", "num_steps": n} for n in steps])
        finest = settings.finest_of.get(adjoint, 0.0)
        tolerances = [x for x in settings.tolerances if x >= finest]
        groups.append([place | {"mesh": "adaptive", "tolerance": x} for x in tolerances])
    return groups


def framework(adjoint: str) -> str:
    """Return "torch" or "jax", the framework that an adjoint is of."""
    return "jax" if adjoint.startswith(("contadj.jax.", "diffrax.")) else "torch"


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Return bytes, seconds and error of one gradient."""
    if framework(cell["adjoint"]) == "torch":
        from ._work_torch import prepare
    else:
        from ._work_jax import prepare
    gradient, count_bytes = prepare(cell["adjoint"], cell.get("num_steps"), cell.get("tolerance"))
    start = perf_counter()
    result = gradient()
    first = perf_counter() - start
    if not np.all(np.isfinite(result)):
        raise FloatingPointError("the gradient is not finite")
    seconds = [first] if first > 2.0 else []
    while len(seconds) < cell["repeats"] and sum(seconds) < 1.0:
        start = perf_counter()
        gradient()
        seconds.append(perf_counter() - start)
    exact = reference()
    return {
        "bytes": count_bytes(),
        "gradient_seconds": median(seconds),
        "error": np.linalg.norm(result - exact) / np.linalg.norm(exact),
    }


def data() -> tuple[Array, dict[str, Array]]:
    """Return y0 and the parameters, by name in the order of the gradient."""
    rng = np.random.default_rng(0)
    params = {
        "W1": rng.normal(size=(DIM, HIDDEN)),
        "W2": rng.normal(size=(HIDDEN, DIM)) / HIDDEN**0.5,
        "b1": rng.normal(size=HIDDEN),
        "b2": rng.normal(size=DIM) / 4,
    }
    return rng.normal(size=(BATCH, DIM)), params


@lru_cache(maxsize=1)
def reference() -> Array:
    """Return the gradient in the parameters, flat, W1, W2, b1, b2."""
    y0, p = data()
    size = y0.size

    def field(t: float, y: Array) -> Array:
        return (np.tanh(y.reshape(y0.shape) @ p["W1"] + p["b1"]) @ p["W2"] + p["b2"]).ravel()

    how: dict[str, Any] = dict(method="DOP853", rtol=1e-12, atol=1e-13)
    y1 = solve_ivp(field, (0.0, T1), y0.ravel(), **how).y[:, -1]

    def backward(s: float, z: Array) -> Array:
        """(y, lambda, theta_bar) in s = T - t."""
        y, adjoint = z[:size].reshape(y0.shape), z[size : 2 * size].reshape(y0.shape)
        a = np.tanh(y @ p["W1"] + p["b1"])
        pulled = (adjoint @ p["W2"].T) * (1 - a**2)
        return np.concatenate([
            -(a @ p["W2"] + p["b2"]).ravel(),
            (pulled @ p["W1"].T).ravel(),
            (y.T @ pulled).ravel(),
            (a.T @ adjoint).ravel(),
            pulled.sum(0),
            adjoint.sum(0),
        ])  # fmt: skip

    count = sum(value.size for value in p.values())
    start = np.concatenate([y1, y1 / BATCH, np.zeros(count)])
    return solve_ivp(backward, (0.0, T1), start, **how).y[2 * size :, -1]


def label_of(adjoint: str) -> str:
    """Return the label of an adjoint in figures, one of `LABELS`."""
    return _PEERS.get(adjoint) or _OURS[adjoint.split(".", 2)[2]]


def adjoints(records: list[Any], framework_name: str) -> list[str]:
    """Return the adjoints of a framework in the order of `LABELS`."""
    found = dict.fromkeys(r["adjoint"] for r in records)
    chosen = [one for one in found if framework(one) == framework_name]
    return sorted(chosen, key=lambda one: LABELS.index(label_of(one)))


def on_fixed_mesh(records: list[Any], adjoint: str) -> list[Any]:
    """Return the records of an adjoint at N steps, N increasing."""
    chosen = [r for r in records if r["adjoint"] == adjoint and r["mesh"] == "fixed"]
    return sorted((r for r in chosen if r.status == "ok"), key=lambda r: r["num_steps"])


def growth(line: list[Any]) -> Slope:
    """Return the growth of the bytes of an adjoint in 1/N, and the order it must show.

    Parameters
    ----------
    line : list of CellRecord
        `on_fixed_mesh` of an adjoint.
    """
    adjoint = line[0]["adjoint"]
    kind = GROWTH[adjoint]
    h, grown = [1 / r["num_steps"] for r in line], [float(r["bytes"]) for r in line]
    if ORDERS[kind]:
        h, grown = h[1:], list(np.diff(grown))
    expected = ExpectedOrder(ORDERS[kind], 0.15, f"{kind}: see contadj.studies.work")
    return Slope(adjoint, h, grown, [0.0] * len(h), expected)


def states_per_step(line: list[Any]) -> float:
    """Return the bytes that a step adds, in sizes of the state, between the two longest meshes."""
    few, many = line[-2:]
    return (many["bytes"] - few["bytes"]) / (many["num_steps"] - few["num_steps"]) / STATE_BYTES


def at_tolerances(records: list[Any], adjoint: str) -> list[Any]:
    """Return the records of an adjoint's adaptive solves, the tolerance decreasing."""
    chosen = [r for r in records if r["adjoint"] == adjoint and r["mesh"] == "adaptive"]
    return sorted((r for r in chosen if r.status == "ok"), key=lambda r: -r["tolerance"])


def findings(records: list[Any]) -> list[str]:
    """Return what was found, in sentences."""
    sentences = []
    for adjoint in dict.fromkeys(r["adjoint"] for r in records):
        line = on_fixed_mesh(records, adjoint)
        if len(line) > 2:
            last, slope = line[-1], growth(line)
            order = slope.observed.order
            found = "none" if order is None else f"{order + 0.0:.2f}"
            sentences.append(
                f"{adjoint}: {last['bytes'] / 2**20:.2f} MiB and {last['gradient_seconds']:.2g} s "
                f"at {last['num_steps']} steps; {GROWTH[adjoint]}, order {found} in 1/N (expected "
                f"{slope.expected.order:g}), {states_per_step(line):.2g} states a step"
            )
        if adaptive := at_tolerances(records, adjoint):
            last = adaptive[-1]
            sentences.append(
                f"{adjoint}: error {last['error']:.1e} in {last['gradient_seconds']:.2g} s and "
                f"{last['bytes'] / 2**20:.2f} MiB at tolerance {last['tolerance']:.0e}"
            )
    return sentences
