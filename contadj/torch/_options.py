"""Options of a solve: what is accepted, translated or refused, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..tableaus import get_tableau
from ._mesh import Mesh, Times, constant_steps, equal_steps, given_steps
from ._steps import StepControl

FIXED = ("step_size", "num_steps", "mesh")
ADAPTIVE = (
    "first_step", "max_num_steps", "norm", "min_step", "max_step", "step_t", "jump_t", "safety",
    "ifactor", "dfactor",
)  # fmt: skip
NEWTON = ("newton_rtol", "max_newton_iterations", "batch_dims")
REFUSED = {
    "grid_constructor": "give the step times themselves as options={'mesh': ...}",
    "perturb": "f is evaluated at the step times; end a step on a discontinuity with 'mesh' or "
    "'jump_t'",
    "interp": "observations between step times come from the method's dense output",
    "dtype": "times are float64 always",
    "max_order": "it belongs to the Adams methods of engine='torchdiffeq'",
}


def adaptive_by_default(method: str) -> bool:
    """Whether a method chooses its own steps unless it is given a mesh."""
    embedded_order = get_tableau(method).embedded_order
    return embedded_order is not None and embedded_order >= 2


def unknown_option(name: str, known: Iterable[str]) -> ValueError:
    """The error for an option that nobody knows."""
    known = tuple(known)
    close = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ValueError(f"`options` has no {name!r}{hint} (known: {', '.join(known)})")


def fixed_mesh(options: Mapping[str, Any], times: Times) -> Mesh | None:
    """The mesh that the options ask for, if they ask for one."""
    given = [name for name in FIXED if name in options]
    if len(given) > 1:
        raise ValueError(f"`options` takes one of {', '.join(FIXED)}, got {' and '.join(given)}")
    if "num_steps" in options:
        return equal_steps(times, options["num_steps"])
    if "step_size" in options:
        return constant_steps(times, _number("step_size", options["step_size"]))
    if "mesh" in options:
        mesh = options["mesh"]
        return given_steps(times, mesh.detach().cpu().numpy() if torch.is_tensor(mesh) else mesh)
    return None


def parse_options(
    method: str, options: Mapping[str, Any] | None, times: Times, control: StepControl
) -> Mesh | StepControl:
    """Turn the options of a solve into its mesh or its step-size control.

    Parameters
    ----------
    method : str
        A method with a tableau.
    options : mapping, optional
        A fixed mesh has one of `step_size`, `num_steps`, `mesh`; error control has `first_step`,
        `max_num_steps`, `norm` and those torchdiffeq has. Those of Newton's method, for an
        implicit method, are left to its stepper.
    times : (T,) array
        Observation times.
    control : StepControl
        Tolerances, and what the options do not say.

    Raises
    ------
    ValueError
        For an unknown or refused option, for contradicting ones, for a value out of range, and for
        a fixed-step method without a mesh.
    """
    options = dict(options or {})
    known = FIXED + ADAPTIVE
    if not get_tableau(method).explicit:
        options = {name: value for name, value in options.items() if name not in NEWTON}
        known += NEWTON
    for name in options:
        if name in REFUSED:
            raise ValueError(f"`options` does not take {name!r}: {REFUSED[name]}")
        if name not in known:
            raise unknown_option(name, known)
    mesh = fixed_mesh(options, times)
    if mesh is not None:
        others = [name for name in options if name not in FIXED]
        if others:
            fixed = next(name for name in FIXED if name in options)
            raise ValueError(
                f"`options` has {fixed!r}, a fixed mesh, and {others[0]!r}, which belongs to "
                "error control; give one of them"
            )
        return mesh
    if not adaptive_by_default(method):
        raise ValueError(
            f"`method` = {method!r} takes fixed steps: give options={{'num_steps': ...}} (per "
            "interval of t), {'step_size': ...} or {'mesh': ...}"
        )
    for name in ("step_t", "jump_t"):
        if name in options:
            value = options[name]
            if isinstance(value, torch.Tensor):
                value = value.detach().cpu().tolist()
            options[name] = tuple(float(v) for v in value)
    for name in ("first_step", "min_step", "max_step", "safety", "ifactor", "dfactor"):
        if options.get(name) is not None:
            options[name] = _number(name, options[name])
    count = options.get("max_num_steps", 1)
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ValueError(f"`max_num_steps` must be a positive integer, got {count!r}")
    norm = options.get("norm", "batch")
    if norm not in ("batch", "sample") and not callable(norm):
        raise ValueError(f"`norm` must be 'batch', 'sample' or a callable, got {norm!r}")
    return replace(control, **options) if options else control


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` must be a number, got {value!r}") from None
    if not number >= 0.0 or (name != "min_step" and number == 0.0):
        raise ValueError(f"`{name}` must be positive, got {number}")
    return number
