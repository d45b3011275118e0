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
import platform
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from . import __version__
from .config import Study
from .convergence import DISCRETE, REFERENCE_METHOD, GradientFunction, Series
from .digests import code_of
from .multistep import MULTISTEP
from .names import closest, parse_options, spell
from .problems import BUILT_IN, GradientProblem, problem_data
from .problems._problem import FRAMEWORKS
from .tableaus import TABLEAUS

DEFAULT_METHODS = (
    "euler", "midpoint", "heun2", "heun3", "bosh3", "rk4", "rk4_classic", "dopri5",
)  # fmt: skip
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


def canonical_spec(spec: str) -> str:
    """Return the one spelling of a problem's name, after checking it.

    Raises
    ------
    ValueError
        If there is no such built-in problem, or it has no such option.
    """
    return spec if ":" in spec else spell(*_parse_built_in(spec))


def _parse_built_in(spec: str) -> tuple[str, dict[str, float]]:
    return parse_options(
        "problem",
        spec,
        tuple(BUILT_IN),
        lambda name: tuple(inspect.signature(BUILT_IN[name]).parameters),
        ", or module:attribute, or path/to/file.py:attribute",
    )


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
    costs: bool = False,
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
        costs=costs,
    )


def plan(study: Study) -> tuple[list[Series], dict[tuple[str, str], GradientProblem], list[str]]:
    """Turn the settings of a study into its cells, and check that every one of them can run.

    Parameters
    ----------
    study : Study
        The settings.

    Returns
    -------
    series : list of Series
        All problems x engines x methods.
    problems : dict
        The problem of each (problem, framework).
    notes : list of str
        One line for each method that an engine does not have, if it was asked for.

    Raises
    ------
    ValueError
        If a problem, backend, engine, method or device is unknown or does not fit the others.
    """
    problems = _problems(study)
    steps_of = {canonical_spec(spec): steps for spec, steps in study.steps_of.items()}
    specs = [spec for spec, _ in problems]
    for spec in steps_of:
        if spec not in specs:
            raise ValueError(
                f"`steps_of` must name problems of the study, {', '.join(specs)}; got {spec!r}"
            )
    frameworks = [f for f in FRAMEWORKS if any(f == framework for _, framework in problems)]
    engines = [(f, engine) for f in frameworks for engine in load_backend(f).ENGINES]
    names = tuple(engine for _, engine in engines)
    for name in study.engines or ():
        if name not in names:
            raise ValueError(
                f"`engine` must be one of {', '.join(names)}; got {name!r}{closest(name, names)}"
            )
    if study.engines:
        engines = [(f, engine) for f, engine in engines if engine in study.engines]
    available = {engine: load_backend(f).methods(engine) for f, engine in engines}
    every = tuple(dict.fromkeys(name for engine in available for name in available[engine]))
    for name in study.methods or ():
        if name not in every:
            raise ValueError(
                f"`method` must be one of {', '.join(every)}; got {name!r}{closest(name, every)}"
            )
    wanted = study.methods or DEFAULT_METHODS
    for engine, its in study.methods_of_engine.items():
        if engine not in names:
            raise ValueError(
                f"`methods_of_engine` must name engines, of {', '.join(names)}; got {engine!r}"
                f"{closest(engine, names)}"
            )
        for name in its if engine in available else ():
            if name not in available[engine]:
                raise ValueError(
                    f"`methods_of_engine` must name methods that {engine} has, of "
                    f"{', '.join(available[engine])}; got {name!r}"
                    f"{closest(name, available[engine])}"
                )
    known = tuple(dict.fromkeys((*every, *TABLEAUS)))
    for name in study.steps_of_method:
        if name not in known:
            raise ValueError(
                f"`steps_of_method` must name methods, of {', '.join(known)}; got {name!r}"
                f"{closest(name, known)}"
            )
    notes = [
        f"engine {engine} has no method {name}: left out"
        for name in study.methods or ()
        for engine in available
        if name not in available[engine]
    ]
    devices = {f: load_backend(f).describe_device(study.device) for f in frameworks}
    versions = {
        f: {
            "contadj": __version__,
            "python": platform.python_version(),
            **load_backend(f).versions(),
        }
        for f in frameworks
    }
    series = [
        Series(
            problem=spec,
            framework=framework,
            engine=engine,
            method=method,
            dtype=study.dtype,
            device=study.device,
            steps=steps_of.get(spec) or study.steps_of_method.get(method, study.steps),
            digest=definition_digest(spec, problem, method),
            reference_engine=reference_engine(framework),
            versions=versions[framework],
            device_description=devices[framework],
        )
        for (spec, framework), problem in problems.items()
        for engine_framework, engine in engines
        if engine_framework == framework
        for method in study.methods_of_engine.get(engine, wanted)
        if method in (study.methods or available[engine]) and method in available[engine]
    ]
    return series, problems, notes


def _problems(study: Study) -> dict[tuple[str, str], GradientProblem]:
    here = installed()
    if not here:
        raise ValueError(
            "no backend is installed; run: pip install 'contadj[torch]' or 'contadj[jax]'"
        )
    problems: dict[tuple[str, str], GradientProblem] = {}
    for spec in dict.fromkeys(map(canonical_spec, study.problems)):
        if ":" in spec:
            problem = load_problem(spec)
            if study.backends and problem.framework not in study.backends:
                load_problem(spec, study.backends[0])  # raises: the other framework
            problems[spec, problem.framework] = problem
        else:
            for framework in study.backends or here:
                problems[spec, framework] = load_problem(spec, framework)
    return problems


def try_problem(series: Series, problem: GradientProblem) -> None:
    """Take one step with a problem, so that a mistake in it is told before the study starts.

    Raises
    ------
    ValueError
        If its functions cannot be run, or do not return what they must.
    """
    try:
        load_backend(series.framework).gradient_function(
            problem,
            method=series.method,
            adjoint=DISCRETE,
            engine=series.engine,
            dtype=series.dtype,
            device=series.device,
            max_steps=1,
        )(1)
    except ArithmeticError:
        pass  # one step is a long one; the cells will tell
    except Exception as error:
        raise ValueError(
            f"`problem` {series.problem} cannot run on {series.framework}: "
            f"{type(error).__name__}: {error}"
        ) from error


def reference_engine(framework: str) -> str:
    """Return the engine of a framework that references are solved with."""
    backend = load_backend(framework)
    return next(e for e in backend.ENGINES if REFERENCE_METHOD in backend.methods(e))


def definition_digest(spec: str, problem: GradientProblem, method: str) -> str:
    """Return a digest of all that defines a cell's numbers: the problem and the method.

    The problem enters by its name, its numbers and the code of the files that its functions are
    in, a user's problem also by every module it has imported from the folder of its vector field;
    the method by its name and coefficients.
    """
    digest = hashlib.sha256()
    numbers = [problem.t0, problem.t1, problem.observation_times, problem.y0, problem.params]
    if ":" not in spec:
        name, options = _parse_built_in(spec)
        numbers.append(problem_data(name, **options).constants)
    _digest(digest, [spec, problem.framework, *numbers])
    for function in (
        problem.f, problem.terminal_cost, problem.running_cost, problem.observation_cost
    ):  # fmt: skip
        if function is not None:
            digest.update(_source(function))
    if ":" in spec:
        for path in _modules_beside(problem.f):
            digest.update(code_of(path))
    _digest(digest, [method, TABLEAUS.get(method) or repr(MULTISTEP.get(method))])
    return digest.hexdigest()[:16]


def _modules_beside(function: Any) -> list[Path]:
    """Files of the imported modules in the folder that a function is written in, or below it."""
    function = inspect.unwrap(getattr(function, "func", function))
    try:
        folder = Path(inspect.getfile(function)).resolve().parent
    except (TypeError, OSError):
        return []
    names = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    files = {Path(name) for name in names if name and Path(name).is_absolute()}
    beside = {path.resolve() for path in files if path.suffix == ".py" and path.is_file()}
    return sorted(path for path in beside if path.is_relative_to(folder))


def _source(function: Any) -> bytes:
    """The text of the file a function, or the class of a callable object, is written in."""
    function = inspect.unwrap(getattr(function, "func", function))  # decorated, functools.partial
    for owner in (function, type(function)):
        try:
            return code_of(inspect.getfile(owner))
        except (TypeError, OSError, SyntaxError):
            continue
    return repr(type(function)).encode()


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
