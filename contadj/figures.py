"""The figures of the study: one script each, reading records only.

A script `paper_figures/NAME.py` has

- its docstring, the caption: what is shown, what to expect, what was found; `{name}` in it stands
  for a number of `numbers`;
- `RECORDS`, the names of the files in experiments/results that it reads, which are also those of
  their configs in experiments;
- `FINDING`, one sentence for the table in paper_figures/README.md, with `{name}` as in the caption;
- `draw(records) -> Figure`, where `records` has a list of records for each of `RECORDS`;
- `numbers(records) -> dict`, what the caption and the finding quote;
- `slopes(records) -> list of Slope`: the lines that were drawn and the order each must show.

All are drawn in the style of `paper_figures/style.mplstyle`. Neither torch nor jax is needed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .orders import ExpectedOrder, ObservedOrder, observed_order
from .results import read_records

DIRECTORY = Path("paper_figures")
CONFIGS = Path("experiments")
RESULTS = CONFIGS / "results"

Records = Mapping[str, list[Any]]


@dataclass(frozen=True)
class Slope:
    """A line of a figure, and the order it must show.

    Parameters
    ----------
    label : str
        Names the line.
    h : sequence of float
        Step sizes, strictly decreasing.
    errors : sequence of float or None
    floors : sequence of float
        Errors up to these values are round-off.
    expected : ExpectedOrder
    why_not : str
        Where the line is known not to show the order on this mesh: the reason. Empty elsewhere.
    """

    label: str
    h: Sequence[float]
    errors: Sequence[float | None]
    floors: Sequence[float]
    expected: ExpectedOrder
    why_not: str = ""

    @property
    def observed(self) -> ObservedOrder:
        """The order of the line's finest pair above round-off, held against the expected one."""
        return observed_order(self.h, self.errors, self.floors, self.expected)


class Script:
    """A figure's script and the records it reads.

    Parameters
    ----------
    name : str
        The script's name without `.py`.
    root : path
        The directory that has paper_figures and experiments.
    results : path, optional
        Where the records are, by default experiments/results.

    Raises
    ------
    ValueError
        If there is no such script or a file of records is missing or damaged.
    """

    def __init__(self, name: str, root: Path = Path(), results: Path | None = None):
        self.name = name
        self.module = _load(name, root)
        self.results = [(results or root / RESULTS) / f"{one}.jsonl" for one in self.module.RECORDS]
        for file in self.results:
            if not file.is_file():
                raise ValueError(
                    f"figure {name} needs {file}, which is not there; make it: contadj figures "
                    f"{name} --recompute"
                )
        self.records: Records = {
            one: read_records(file)
            for one, file in zip(self.module.RECORDS, self.results, strict=True)
        }

    @property
    def caption(self) -> str:
        """The caption, its numbers computed from the records."""
        return self._filled(self.module.__doc__ or "")

    @property
    def finding(self) -> str:
        """What was found, in one sentence."""
        return self._filled(self.module.FINDING)

    def _filled(self, text: str) -> str:
        return text.strip().format(**self.module.numbers(self.records))

    @property
    def slopes(self) -> list[Slope]:
        """The lines of the figure and their orders."""
        return self.module.slopes(self.records)

    @property
    def minutes(self) -> float:
        """Minutes of one process that the records took."""
        return sum(r.seconds or 0.0 for records in self.records.values() for r in records) / 60

    def save(self, out: Path) -> list[Path]:
        """Draw the figure and write it as PDF and PNG, its caption beside it.

        Parameters
        ----------
        out : path
            A directory, made where missing.

        Returns
        -------
        list of path
            The files written.
        """
        import matplotlib.style

        out.mkdir(parents=True, exist_ok=True)
        style = Path(str(self.module.__file__)).parent / "style.mplstyle"
        with matplotlib.style.context(style):
            figure = self.module.draw(self.records)
            paths = [out / f"{self.name}{suffix}" for suffix in (".pdf", ".png", ".txt")]
            # No date in the files: the same records give the same bytes.
            figure.savefig(paths[0], metadata={"CreationDate": None})
            figure.savefig(paths[1])
        paths[2].write_text(self.caption + "\n", encoding="utf-8")
        return paths


def script_names(root: Path = Path()) -> list[str]:
    """Names of the figures of a directory."""
    return sorted(path.stem for path in (root / DIRECTORY).glob("[a-z]*.py"))


def records_of(name: str, root: Path = Path()) -> tuple[str, ...]:
    """Names of the files of records that a figure reads."""
    return tuple(_load(name, root).RECORDS)


def _load(name: str, root: Path) -> ModuleType:
    path = root / DIRECTORY / f"{name}.py"
    if not path.is_file():
        have = ", ".join(script_names(root)) or "none"
        raise ValueError(f"`figure` must be one of {have}; got {name!r}")
    specification = importlib.util.spec_from_file_location(f"paper_figure_{path.stem}", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def readme(scripts: Sequence[Script]) -> str:
    """Return the text of paper_figures/README.md: figure, script, config, minutes, finding."""
    lines = [
        "# The figures of the study",
        "",
        "`contadj figures` draws them from the records in experiments/results into",
        "paper_figures/out, and writes this table; `contadj figures --recompute` measures anew",
        "first. Minutes are those of one process for the records, compilation included.",
        "",
        "| figure | script | config | minutes | finding |",
        "|---|---|---|---:|---|",
    ]
    for one in scripts:
        configs = ", ".join(f"[{name}](../{CONFIGS}/{name}.toml)" for name in one.module.RECORDS)
        title = (one.module.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        lines.append(
            f"| {title} | [{one.name}]({one.name}.py) | {configs} | {one.minutes:.1f} | "
            f"{one.finding} |"
        )
    return "\n".join(lines) + "\n"
