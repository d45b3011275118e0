"""A user's problem: nonlinear, explicitly time-dependent, nested params, costs at observations."""

import torch

from contadj import GradientProblem


def f(t, y, p):
    x, v = y[0], y[1]
    force = -p["spring"]["k"] * torch.sin(x) - p["b"] * v
    return torch.stack([v, force + p["drive"]["a"] * torch.cos(p["drive"]["omega"] * t)])


def squared_distance(i, t, y, p):
    return (y[0] - 0.1 * (i + 1)) ** 2 + 0.5 * y[1] ** 2


def problem(name="driven"):
    number = lambda value: torch.tensor(value, dtype=torch.float64)  # noqa: E731
    params = {
        "spring": {"k": number(2.0)},
        "b": number(0.3),
        "drive": {"omega": number(1.7), "a": number(0.8)},
    }
    return GradientProblem(
        name, "torch", f, number([1.0, 0.5]), params, 0.0, 3.0,
        observation_times=(0.7, 1.5, 3.0), observation_cost=squared_distance,
    )  # fmt: skip
