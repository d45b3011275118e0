"""The committed records of step-size studies: complete, and as new as the code behind them."""

from pathlib import Path

import pytest

from contadj import backends
from contadj.config import Study, load_study
from contadj.results import read_records
from contadj.studies._run import StudyCells

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CONFIGS = sorted(path for path in EXPERIMENTS.glob("*.toml") if path.stem != "quickstart")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_records_of_a_config_are_its_cells_computed_by_the_code_as_it_is(config):
    study = load_study(config)
    records = read_records(EXPERIMENTS / "results" / f"{config.stem}.jsonl")
    assert not [one.message for one in records if one.status == "failed"]
    there = {one.identity for one in records}
    if isinstance(study, Study):
        series, _, _ = backends.plan(study)
        cells = {one.identity(n) for one in series for n in one.steps}
    else:
        cells = StudyCells(str(study.study), study).identities
    assert there == cells, (
        f"{len(cells - there)} cells have no record, {len(there - cells)} records are of no cell "
        f"or of code that has changed; run: contadj figures --recompute"
    )
