"""The audit of torchdiffeq and Diffrax: which methods, which stated orders, which lambda."""

import importlib.util
from functools import cache
from pathlib import Path

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torchdiffeq._impl.odeint import SOLVERS

from contadj import backends
from contadj.config import Study, load_study
from contadj.jax._library import library_solver
from contadj.torch._torchdiffeq import CARRYING

ROOT = Path(__file__).parents[2]
ENGINES = {"torchdiffeq": "torch", "diffrax": "jax", "contadj": "torch"}
A, THETA, Y0, T, TARGET = -0.8, 0.5, 1.2, 2.0, 0.3  # of the problem lin
SDE = {
    "ALIGN", "EulerHeun", "GeneralShARK", "ItoMilstein", "QUICSORT", "SEA", "SPaRK", "SRA1",
    "ShARK", "ShOULD", "SlowRK", "StratonovichMilstein",
}  # fmt: skip
IMEX = {"KenCarp3", "KenCarp4", "KenCarp5", "Sil3"}


def load_script():
    path = ROOT / "paper_figures" / "library_audit.py"
    specification = importlib.util.spec_from_file_location("audit_under_test", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


AUDIT = load_script()


@pytest.mark.parametrize("method", AUDIT.STATED["torchdiffeq"])
def test_the_stated_order_is_that_of_torchdiffeqs_solver_class(method):
    assert SOLVERS[method].order == AUDIT.STATED["torchdiffeq"][method]


@pytest.mark.parametrize("method", AUDIT.STATED["diffrax"])
def test_the_stated_order_is_the_one_diffrax_returns(method):
    assert getattr(diffrax, method)().order(None) == AUDIT.STATED["diffrax"][method]


def test_every_method_of_torchdiffeq_is_audited_or_left_out_for_a_reason():
    # fixed_adams is another name of implicit_adams there.
    names = {name for name, solver in SOLVERS.items() if name != "fixed_adams"}
    assert names == {*AUDIT.STATED["torchdiffeq"], "scipy_solver"}
    assert "scipy_solver" in AUDIT.LEFT_OUT


def test_every_solver_of_diffrax_is_audited_or_left_out_for_a_reason():
    solvers = {
        name
        for name, value in vars(diffrax).items()
        if isinstance(value, type) and issubclass(value, diffrax.AbstractSolver)
        and not name.startswith("Abstract")
    }  # fmt: skip
    left_out = set(AUDIT.LEFT_OUT) - {"scipy_solver"}
    assert solvers == {*AUDIT.STATED["diffrax"], *SDE, *IMEX, *left_out}


@pytest.mark.parametrize("engine", AUDIT.STATED)
def test_the_config_runs_every_audited_method(engine):
    study = load_study(ROOT / "experiments" / "library_audit.toml")
    assert set(study.methods_of_engine[engine]) == set(AUDIT.STATED[engine])


@cache
def measure(engine, method, problem="lin", adjoint="DirectAdjoint", n=16):
    return backends.gradient_function(
        problem=problem, framework=ENGINES[engine], engine=engine, method=method, adjoint=adjoint,
        dtype="float64", device="cpu", max_steps=16,
    )(n)  # fmt: skip


PAIRS = {
    "Heun": "heun2", "Bosh3": "bosh3", "Dopri5": "dopri5", "ImplicitEuler": "implicit_euler",
    "ReversibleHeun": "reversible_heun",
}  # fmt: skip


@pytest.mark.parametrize("adjoint", ["DirectAdjoint", "BacksolveAdjoint"])
@pytest.mark.parametrize(("solver", "method"), PAIRS.items())
def test_diffraxs_solver_gives_the_gradient_of_the_method_it_implements(solver, method, adjoint):
    got = measure("diffrax", solver, "pend", adjoint)
    want = measure("contadj", method, "pend", adjoint)
    np.testing.assert_allclose(got.gradient.vector, want.gradient.vector, rtol=1e-10)
    if adjoint == "DirectAdjoint":
        np.testing.assert_allclose(got.adjoint, want.adjoint, rtol=1e-9, atol=1e-10)


def solve_implicitly(solver):
    term = diffrax.ODETerm(lambda t, y, args: jnp.sin(y) - y)
    return diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.1, jnp.ones(1), throw=False)


def test_diffraxs_implicit_solvers_need_another_root_finder_on_a_fixed_mesh():
    with pytest.raises(ValueError, match="tolerances for the implicit solver have not been"):
        solve_implicitly(diffrax.Kvaerno3())
    with jax.enable_x64(True):
        chord = diffrax.VeryChord(rtol=1e-12, atol=1e-13)
        stopped = solve_implicitly(diffrax.Kvaerno3(root_finder=chord))
        solved = solve_implicitly(library_solver("Kvaerno3"))
    assert stopped.result == diffrax.RESULTS.nonlinear_divergence
    assert solved.result == diffrax.RESULTS.successful


def test_lambda_of_adaptive_heun_holds_its_carried_slope_fixed():
    # y+ = y + h/2 (k + f(y + h k)), k+ = f(y + h k): the adjoint of (y, k) for f = a y + theta.
    n = 16
    h = T / n
    measured = measure("torchdiffeq", "adaptive_heun", n=n)
    y, k = Y0, A * Y0 + THETA
    for _ in range(n):
        inner = A * (y + h * k) + THETA
        y, k = y + h / 2 * (k + inner), inner
    adjoint, of_slope = 2 * (y - TARGET), 0.0
    want = [adjoint]
    for _ in range(n):
        adjoint, of_slope = (
            (1 + h * A / 2) * adjoint + A * of_slope,
            h / 2 * (1 + h * A) * adjoint + h * A * of_slope,
        )
        want.append(adjoint)
    want[-1] += A * of_slope  # at the start the slope is f(y_0)
    np.testing.assert_allclose(measured.adjoint[:, 0], want[::-1], rtol=1e-13)


def test_lambda_of_diffraxs_leapfrog_follows_the_two_step_recursion():
    # y_{n+1} = y_{n-1} + 2 h f(y_n), after a step by Euler.
    n = 16
    h = T / n
    measured = measure("diffrax", "LeapfrogMidpoint", n=n)
    ys = [Y0, Y0 + h * (A * Y0 + THETA)]
    for _ in range(n - 1):
        ys.append(ys[-2] + 2 * h * (A * ys[-1] + THETA))
    last = 2 * (ys[-1] - TARGET)
    want = [0.0, last]
    for _ in range(n - 1):
        want.append(2 * h * A * want[-1] + want[-2])
    want.append((1 + h * A) * want[-1] + want[-2])
    np.testing.assert_allclose(measured.adjoint[:, 0], want[:0:-1], rtol=1e-12)


@pytest.mark.filterwarnings("ignore:Functional iteration did not converge")
@pytest.mark.parametrize("method", CARRYING)
def test_the_first_lambda_of_a_method_that_carries_is_the_gradient_in_y0(method):
    measured = measure("torchdiffeq", method, "pend")
    np.testing.assert_allclose(measured.adjoint[0], measured.gradient.y0, rtol=1e-12)


def test_a_study_can_be_planned_with_diffraxs_own_solvers():
    study = Study(problems=("pend",), engines=("diffrax",), methods=("Tsit5", "LeapfrogMidpoint"))
    series, _, notes = backends.plan(study)
    assert [one.method for one in series] == ["Tsit5", "LeapfrogMidpoint"] and not notes
