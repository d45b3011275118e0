"""The two backends, loaded on request, and problems found by the name a user types.

A problem is named by

- a built-in name, with options where it has some: `NAME` or `NAME(OPTION=1.5,...)`,
- `module:attribute`,
- `path/to/file.py:attribute`,

where the attribute is a `GradientProblem`, or a function without arguments that returns one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .convergence import GradientFunction
from .problems import BUILT_IN, GradientProblem, problem_data
from .problems._problem import FRAMEWORKS
from .tableaus import TABLEAUS

_PACKAGES = {"torch": ("torch", "torchdiffeq"), "jax": ("jax", "diffrax")}


def installed() -> tuple[str, ...]:
    """Return the frameworks whose packages are installed, without importing them."""
    return tuple(
        framework
        for framework in FRAMEWORKS
        if all(importlib.util.find_spec(package) for package in _PACKAGES[framework])
    )


def load_backend(framework: str) -> ModuleType:
    """Import a backend's side of the study, and with it the framework.

    Raises
    ------
    ValueError
        If the framework is unknown or not installed.
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"`backend` must be one of {', '.join(FRAMEWORKS)}; got {framework!r}")
    if framework not in installed():
        needs = " and ".join(_PACKAGES[framework])
        raise ValueError(
            f"`backend` {framework} needs {needs}, which are not installed; "
            f"run: pip install 'contadj[{framework}]'"
        )
    return importlib.import_module(f"contadj.{framework}._study")


def closest(name: str, names: Mapping[str, Any] | tuple[str, ...] | list[str]) -> str:
    """Return ", did you mean X?" for the nearest of `names`, or nothing."""
    match = get_close_matches(name, list(names), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def canonical_spec(spec: str) -> str:
    """Return the one spelling of a problem's name, after checking it.

    Raises
    ------
    ValueError
        If there is no such built-in problem, or it has no such option.
    """
    if ":" in spec:
        return spec
    name, options = _parse_built_in(spec)
    arguments = ",".join(f"{key}={value:g}" for key, value in sorted(options.items()))
    return f"{name}({arguments})" if arguments else name


def _parse_built_in(spec: str) -> tuple[str, dict[str, float]]:
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:\((.*)\))?\s*", spec)
    if match is None:
        raise ValueError(
            f"`problem` must be NAME, NAME(OPTION=VALUE,...), module:attribute or "
            f"path/to/file.py:attribute; got {spec!r}"
        )
    name, text = match.groups()
    if name not in BUILT_IN:
        raise ValueError(
            f"`problem` must be one of {', '.join(BUILT_IN)}, or module:attribute, or "
            f"path/to/file.py:attribute; got {spec!r}{closest(name, BUILT_IN)}"
        )
    known = tuple(inspect.signature(BUILT_IN[name]).parameters)
    options: dict[str, float] = {}
    for part in filter(None, (text or "").split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            raise ValueError(
                f"options of `problem` {name} must be among ({', '.join(known)}); got {key!r}"
                f"{closest(key, known)}"
            )
        try:
            options[key] = float(value)
        except ValueError:
            raise ValueError(
                f"option {key} of `problem` {name} must be a number; got {value!r}"
            ) from None
    return name, options


@cache
def load_problem(spec: str, framework: str | None = None) -> GradientProblem:
    """Return the problem of a name.

    Parameters
    ----------
    spec : str
        What the user typed; see this module's docstring.
    framework : str, optional
        The backend to run it on; needed for a built-in problem, which exists in both.

    Raises
    ------
    ValueError
        If there is no such problem, loading it fails, or it is written in the other framework.
    """
    if ":" in spec:
        problem = _load_attribute(spec)
    else:
        name, options = _parse_built_in(spec)
        assert framework is not None
        problem = load_backend(framework).builtin_problem(name, **options)
    if framework is not None and problem.framework != framework:
        raise ValueError(
            f"`problem` {spec} is written in {problem.framework} and cannot run on the {framework} "
            f"backend; use --backend {problem.framework}"
        )
    return problem


def _load_attribute(spec: str) -> GradientProblem:
    source, _, attribute = spec.rpartition(":")
    try:
        module = _import_file(source) if source.endswith(".py") else _import_module(source)
    except Exception as error:
        raise ValueError(
            f"`problem` {spec}: {source} cannot be loaded ({type(error).__name__}: {error})"
        ) from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ValueError(
            f"`problem` {spec}: {source} has no {attribute!r}{closest(attribute, public)}"
        )
    value = getattr(module, attribute)
    if not isinstance(value, GradientProblem) and callable(value):
        try:
            value = value()
        except Exception as error:
            raise ValueError(
                f"`problem` {spec}: {attribute}() must return a GradientProblem, but raised "
                f"{type(error).__name__}: {error}"
            ) from error
    if not isinstance(value, GradientProblem):
        raise ValueError(
            f"`problem` {spec} must be a GradientProblem or a function without arguments that "
            f"returns one; got {type(value).__name__}"
        )
    return value


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _import_file(source: str) -> ModuleType:
    path = Path(source).resolve()
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    name = f"contadj_problem_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses in the file look their module up
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    specification.loader.exec_module(module)
    return module


# Two adjoints of the series in work, and the reference; more would pile up compiled functions.
@lru_cache(maxsize=4)
def gradient_function(
    *,
    problem: str,
    framework: str,
    engine: str,
    method: str,
    adjoint: str,
    dtype: str,
    device: str,
    max_steps: int,
) -> GradientFunction:
    """Return the compiled gradient function of a problem, kept for the next number of steps."""
    return load_backend(framework).gradient_function(
        load_problem(problem, framework),
        method=method,
        adjoint=adjoint,
        engine=engine,
        dtype=dtype,
        device=device,
        max_steps=max_steps,
    )


def definition_digest(spec: str, problem: GradientProblem, method: str) -> str:
    """Return a digest of all that defines a cell's numbers: the problem and the method.

    The problem enters by its name, its numbers and the text of the file its vector field is in;
    the method by its name and coefficients.
    """
    digest = hashlib.sha256()
    numbers = [problem.t0, problem.t1, problem.observation_times, problem.y0, problem.params]
    if ":" not in spec:
        name, options = _parse_built_in(spec)
        numbers.append(problem_data(name, **options).constants)
    _digest(digest, [spec, problem.framework, *numbers])
    try:
        digest.update(Path(inspect.getfile(inspect.unwrap(problem.f))).read_bytes())
    except (TypeError, OSError):  # a callable object: its class has the file
        digest.update(Path(inspect.getfile(type(problem.f))).read_bytes())
    _digest(digest, [method, TABLEAUS.get(method)])
    return digest.hexdigest()[:16]


def _digest(digest: Any, value: Any) -> None:
    """Add a pytree of numbers to a digest, whatever the framework of its leaves."""
    if isinstance(value, Mapping):
        value = [item for key in sorted(value) for item in (key, value[key])]
    elif hasattr(value, "state_dict"):
        value = list(value.state_dict().items())
    elif hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, entry.name, None) for entry in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        digest.update(b"[")
        for item in value:
            _digest(digest, item)
        digest.update(b"]")
    elif isinstance(value, str | int | float | None):
        digest.update(repr(value).encode())
    elif callable(value):
        digest.update(getattr(value, "__qualname__", type(value).__qualname__).encode())
    else:
        array = np.asarray(value)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
