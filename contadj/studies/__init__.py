"""The questions of the study that are not a plain grid of step sizes, one module each.

A config says `study = "NAME"` for the module `contadj.studies.NAME`, which has

- its docstring: the question, what is expected, and the source of what is expected;
- `Settings`, a subclass of `contadj.config.Settings`: the keys of its config, with defaults;
- `cells(settings) -> list of list of dict`: the cells, each a dict of plain values, its place on
  the axes of the study; cells of one inner list share what is compiled, and follow each other;
- `measure(cell) -> dict`: what one cell gives, as plain values, lists of them or NumPy arrays.
  Called in a worker; imports the framework it needs itself. An ArithmeticError means that the cell
  diverged, any other error that it failed;
- `findings(records) -> list of str`: what was found, in plain sentences computed from the records;
- `SOURCES`, a tuple of module names: whose code the numbers come from, beside the module itself.
  Records are stale once that code has changed.

What a question needs in a framework is in `_NAME_torch.py` and `_NAME_jax.py` beside it. Nothing
here imports torch or jax before a cell is measured.
"""

from __future__ import annotations

import importlib
import pkgutil
from difflib import get_close_matches
from types import ModuleType


def names() -> tuple[str, ...]:
    """Names of the modules here that are a study."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in found if not name.startswith("_")))


def load_module(name: str) -> ModuleType:
    """Return the module of a study.

    Raises
    ------
    ValueError
        If there is no such study.
    """
    known = names()
    if name not in known:
        near = get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`study` must be one of {', '.join(known)}; got {name!r}{hint}")
    return importlib.import_module(f"{__name__}.{name}")
