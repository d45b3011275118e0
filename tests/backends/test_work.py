"""The study of memory and work: its reference, and that bytes grow as it says on short meshes."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from contadj.results import CellRecord
from contadj.studies import work

STEPS = (64, 128)  # a mesh of some 32 steps fills 16 snapshots at another moment of the sweep


def line(adjoint, steps=STEPS):
    cells = [{"adjoint": adjoint, "repeats": 1, "mesh": "fixed", "num_steps": n} for n in steps]
    return [
        CellRecord(study="work", cell=cell, digest="", status="ok", values=work.measure(cell))
        for cell in cells
    ]


def test_the_reference_is_the_slope_of_the_cost():
    y0, params = work.data()
    direction = np.random.default_rng(1).normal(size=work.reference().size)
    sizes = np.cumsum([value.size for value in params.values()])[:-1]

    def cost(amount):
        moved = np.split(amount * direction, sizes)
        p = {
            name: value + move.reshape(value.shape)
            for (name, value), move in zip(params.items(), moved, strict=True)
        }

        def field(t, y):
            a = np.tanh(y.reshape(y0.shape) @ p["W1"] + p["b1"])
            return (a @ p["W2"] + p["b2"]).ravel()

        how = dict(method="DOP853", rtol=1e-12, atol=1e-13)
        y1 = solve_ivp(field, (0.0, work.T1), y0.ravel(), **how).y[:, -1]
        return (y1**2).sum() / (2 * len(y0))

    h = 1e-3
    # Fourth-order central difference: error about h^4 and 1e-12 / h.
    slope = (8 * (cost(h) - cost(-h)) - cost(2 * h) + cost(-2 * h)) / (12 * h)
    assert work.reference() @ direction == pytest.approx(slope, rel=1e-7)


@pytest.mark.parametrize(
    "adjoint",
    [
        "contadj.torch.DirectAdjoint",
        "contadj.torch.CheckpointAdjoint",
        "contadj.torch.CheckpointAdjoint(16)",
        "contadj.torch.ReversibleAdjoint",
        "contadj.torch.BacksolveAdjoint",
        "contadj.torch.GaussAdjoint",
        "torchdiffeq.odeint",
        "torchdiffeq.odeint_adjoint",
        "torchode.AutoDiffAdjoint",
        "contadj.jax.CheckpointAdjoint",
        "contadj.jax.BacksolveAdjoint",
    ],
)
def test_bytes_grow_with_the_steps_as_stated(adjoint):
    states = work.states_per_step(line(adjoint))
    if work.GROWTH[adjoint] == "constant":
        assert abs(states) < 0.02
    elif work.GROWTH[adjoint] == "states":
        assert states == pytest.approx(1, abs=0.1)
    else:
        assert 8 <= states <= 20


@pytest.mark.parametrize(
    "adjoint", ["torchdiffeq.odeint", "torchode.AutoDiffAdjoint", "contadj.jax.CheckpointAdjoint"]
)
def test_all_libraries_solve_the_same_problem_on_the_same_mesh(adjoint):
    (ours,), (theirs,) = (line(one, [16]) for one in ("contadj.torch.DirectAdjoint", adjoint))
    assert theirs["error"] == pytest.approx(ours["error"], rel=1e-10)


@pytest.mark.parametrize(
    "adjoint", ["contadj.torch.GaussAdjoint", "torchode.JointBacksolveAdjoint"]
)
def test_an_adaptive_gradient_gets_better_with_the_tolerance(adjoint):
    coarse, fine = (
        work.measure({"adjoint": adjoint, "repeats": 1, "mesh": "adaptive", "tolerance": at})
        for at in (1e-3, 1e-6)
    )
    assert fine["error"] < 1e-3 and fine["error"] < coarse["error"] / 30


def test_an_adjoint_that_the_study_does_not_know_is_an_error():
    with pytest.raises(ValueError, match=r"must be of contadj\.torch\.DirectAdjoint"):
        work.Settings(study="work", adjoints=("torchdiffeq.odeint_event",))
