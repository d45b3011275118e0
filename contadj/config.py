"""A study as settings: from a TOML file, the command line, or both."""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .adjoints import canonical_adjoint
from .names import closest
from .studies import load_module

Names = Annotated[tuple[str, ...], Field(min_length=1)]
Steps = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]


class Settings(BaseModel):
    """What every study's settings have; a key they do not have is an error.

    Parameters
    ----------
    study : str, optional
        The module of `contadj.studies`; none for a step-size study.
    out : path
        Directory for records and figures.
    jobs : int
        Cells in work at once, each in its own process if more than one.
    quick : dict
        Settings that take the place of these in a reduced run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    study: str | None = None
    out: Path = Path("out")
    jobs: Annotated[int, Field(ge=1)] = 1
    quick: dict[str, Any] = {}


class Study(Settings):
    """What a step-size study covers: every problem x engine x method x number of steps.

    Parameters
    ----------
    problems : tuple of str
        Built-in names, `module:attribute` or `path/to/file.py:attribute`.
    backends : tuple of str, optional
        "torch", "jax"; by default those installed that a problem is written for.
    engines : tuple of str, optional
        What does the stepping; by default all engines of the backends.
    methods : tuple of str, optional
        By default eight explicit Runge-Kutta methods of orders 1 to 5.
    methods_of_engine : dict of str to tuple of str
        The methods to run on the engines named, of `methods` where that is given.
    steps : tuple of int
        Numbers of steps between neighbouring breakpoints of a problem.
    steps_of : dict of str to tuple of int
        Other numbers of steps for the problems named.
    steps_of_method : dict of str to tuple of int
        Other numbers of steps for the methods named, on problems that `steps_of` does not name.
    dtype : str
        "float64" or "float32".
    device : str
        "cpu", "cuda", "cuda:1", ...
    adjoints : tuple of str
        Adjoints to compare at one number of steps of each method, where the discrete gradient
        reaches `tolerance` or else the largest: their errors, time and memory. With options where
        they have some, `BacksolveAdjoint(restart_every=32)` say.
    tolerance : float, optional
        The relative error of the gradient that is wanted.
    study, out, jobs, quick
        As in `Settings`.
    """

    problems: Names
    backends: Annotated[tuple[Literal["torch", "jax"], ...], Field(min_length=1)] | None = None
    engines: Names | None = None
    methods: Names | None = None
    methods_of_engine: dict[str, Names] = {}
    steps: Steps = (8, 16, 32, 64, 128)
    steps_of: dict[str, Steps] = {}
    steps_of_method: dict[str, Steps] = {}
    dtype: Literal["float64", "float32"] = "float64"
    device: str = "cpu"
    adjoints: tuple[str, ...] = ()
    tolerance: Annotated[float, Field(gt=0)] | None = None

    @field_validator("steps")
    @classmethod
    def _increasing(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(steps)))

    @field_validator("steps_of", "steps_of_method")
    @classmethod
    def _each_increasing(cls, steps_of: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(sorted(set(steps))) for name, steps in steps_of.items()}

    @field_validator("adjoints")
    @classmethod
    def _known(cls, adjoints: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(canonical_adjoint, adjoints)))

    @field_validator("problems", "backends", "engines", "methods")
    @classmethod
    def _once(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if names is None else tuple(dict.fromkeys(names))


def load_study(path: str | Path | None = None, *, quick: bool = False, **settings: Any) -> Settings:
    """Return a validated study: a `Study`, or the `Settings` of the module of `contadj.studies`
    that the key `study` names.

    Parameters
    ----------
    path : path, optional
        A TOML file with the fields of the settings as keys.
    quick : bool
        Whether the table `[quick]` of the file replaces what it names.
    **settings
        Fields, which replace those of the file; None leaves a field as it is.

    Raises
    ------
    ValueError
        If the file cannot be read or is not TOML, a key is unknown, or a value is not what the key
        needs.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"config {path}: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"config {path} is not TOML: {error}") from None
    source = "settings" if path is None else f"config {path}"
    if quick:
        values |= values.get("quick", {})
    values |= {key: value for key, value in settings.items() if value is not None}
    kind: type[Settings] = Study
    if (name := values.get("study")) is not None:
        try:
            kind = load_module(name).Settings
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{source}: {_one_line(error, kind)}") from None


def _one_line(error: ValidationError, kind: type[Settings]) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
    if first["type"] == "extra_forbidden":
        known = sorted(kind.model_fields, key=lambda field: field in Settings.model_fields)
        near = get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}"
        return f"unknown key {key!r}; {hint}"
    if first["type"] == "missing":
        return f"`{key}` is missing; name at least one"
    if first["type"] == "value_error":
        return f"`{key}`: {first['msg'].removeprefix('Value error, ')}"
    near = ""
    if first["type"] == "literal_error":
        near = closest(str(first["input"]), re.findall(r"'(\w+)'", first["msg"]))
    return f"`{key}`: {first['msg']}; got {first['input']!r}{near}"
