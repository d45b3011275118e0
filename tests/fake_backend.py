"""A backend of known errors, for tests of the study: no framework, no solver.

The exact gradient of every problem is (1, ..., 1) / sqrt(size) and lambda(t) = exp(-t); each
method adds an error of its own order, so that the study must find just these orders.
"""

import time

import numpy as np

from contadj.convergence import Measurement
from contadj.problems import Gradient, GradientProblem, problem_data

ENGINES = ("fake",)
_ORDERS = {"euler": 1, "heun2": 2, "midpoint": 2, "rk4": 4, "dopri8": 8, "diverges": 1, "raises": 1}
CALLS = []  # (adjoint, num_steps), in this process


def methods(engine):
    assert engine == "fake"
    return tuple(_ORDERS)


def adjoints():
    return ("DirectAdjoint", "BacksolveAdjoint")


def versions():
    return {"fake": "1.0"}


def describe_device(device):
    if device != "cpu":
        raise ValueError(f"`device` must be one of cpu; got {device!r}; use --device cpu")
    return "no device"


def builtin_problem(name, **options):
    data = problem_data(name, **options)
    return GradientProblem(
        name, "torch", vector_field, data.y0, data.params, data.t0, data.t1,
        terminal_cost=vector_field, gradient=exact_gradient(data.params), adjoint=exact_adjoint,
    )  # fmt: skip


def vector_field(t, y, p):
    raise AssertionError("the fake backend solves nothing")


def exact_gradient(params):
    leaves = []

    def flatten(tree):
        for _, value in sorted(tree.items()):
            flatten(value) if isinstance(value, dict) else leaves.append(np.ravel(value))

    flatten(params)
    p = sum(map(np.size, leaves))
    return Gradient(2.0, [1 / np.sqrt(p + 1)], np.full(p, 1 / np.sqrt(p + 1)))


def exact_adjoint(t):
    return np.exp([-t])


def gradient_function(problem, *, method, adjoint, engine, dtype, device, max_steps, costs=False):
    order = _ORDERS[method]
    exact = exact_gradient(problem.params)
    # The gap of heun2 is of order 3: its two gradients share their leading error.
    shared = {"heun2": 3}.get(method, order)

    def gradient_at(num_steps):
        assert num_steps <= max_steps
        CALLS.append((adjoint, num_steps))
        if method == "raises" and num_steps == 16:
            raise TypeError("no luck\nat all")
        mesh = problem.mesh(num_steps)
        h = np.max(np.diff(mesh))
        error = h**order
        if adjoint == "BacksolveAdjoint":
            error = error + 0.5 * h**shared
        if method == "diverges" and num_steps == 8:
            error = np.nan
        if dtype == "float32":
            error = error + 1e-7
        gradient = Gradient(exact.cost + h**order, exact.y0, exact.params + error * exact.params[0])
        direct = adjoint == "DirectAdjoint"
        lambdas = np.exp(-mesh) + h**order * mesh / mesh[-1]
        return Measurement(
            gradient, mesh, lambdas[:, None] if direct else None, order * num_steps,
            2 * order * num_steps, None if direct else h**order, 1e-3,
        )  # fmt: skip

    return gradient_at


def make(*, problem, framework, **arguments):
    """For `run_study`: every problem named is the built-in one of that name."""
    return gradient_function(builtin_problem(problem), **arguments)


def make_slow(*, problem, framework, **arguments):
    gradient_at = make(problem=problem, framework=framework, **arguments)

    def slow(num_steps):
        time.sleep(0.05)
        return gradient_at(num_steps)

    return slow
