"""The figures of the study: rebuilt from the committed records, their slopes held to theory."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from contadj.figures import Script, readme, script_names
from contadj.studies._run import study_digest

ROOT = Path(__file__).parents[2]
NAMES = script_names(ROOT)
SLOPES = [(name, slope) for name in NAMES for slope in Script(name, ROOT).slopes]


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_is_rebuilt_from_its_records(name, tmp_path):
    script = Script(name, ROOT)
    pdf, png, caption = script.save(tmp_path)
    assert pdf.read_bytes().startswith(b"%PDF") and png.read_bytes().startswith(b"\x89PNG")
    assert len(caption.read_text()) > 200 and "{" not in caption.read_text()


@pytest.mark.parametrize(
    ("name", "slope"), SLOPES, ids=[f"{name}-{slope.label}" for name, slope in SLOPES]
)
def test_a_line_of_a_figure_shows_the_expected_order(name, slope):
    observed = slope.observed
    if slope.expected.exact:
        assert observed.state == "at round-off", observed
    elif slope.why_not:
        assert observed.state != "as expected", f"{slope.label} shows it; take `why_not` away"
    else:
        assert observed.state == "as expected", observed


def test_the_table_of_figures_is_the_one_that_the_records_give():
    table = readme([Script(name, ROOT) for name in NAMES])
    assert (ROOT / "paper_figures" / "README.md").read_text() == table


def test_every_config_of_the_study_has_its_records_and_its_figure():
    configs = {path.stem for path in (ROOT / "experiments").glob("*.toml")} - {"quickstart"}
    results = {path.stem for path in (ROOT / "experiments" / "results").glob("*.jsonl")}
    drawn = {record for name in NAMES for record in Script(name, ROOT).module.RECORDS}
    assert configs == results == drawn


@pytest.mark.parametrize("name", NAMES)
def test_records_of_a_study_are_as_new_as_its_code(name):
    records = [one for found in Script(name, ROOT).records.values() for one in found]
    made_by = {(one.study, one.digest) for one in records if hasattr(one, "study")}
    for study, digest in made_by:
        assert digest == study_digest(study), (
            f"the code of {study} has changed since these records were made; run: contadj figures "
            f"{name} --recompute"
        )


def test_figures_are_drawn_without_a_framework(tmp_path):
    code = f"""
        import sys
        from pathlib import Path
        from contadj.figures import Script, script_names
        for name in script_names(Path({str(ROOT)!r}))[:2]:
            Script(name, Path({str(ROOT)!r})).save(Path({str(tmp_path)!r}))
        assert not {{"torch", "jax", "diffrax", "torchdiffeq"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_figure_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path):
    with pytest.raises(ValueError, match=r"`figure` must be one of .*; got 'nothing'"):
        Script("nothing", ROOT)
    (tmp_path / "paper_figures").mkdir()
    (tmp_path / "paper_figures" / "one.py").write_text('"""One."""\nRECORDS = ("one",)\n')
    with pytest.raises(ValueError, match=r"figure one needs .*one.jsonl, which is not there"):
        Script("one", tmp_path)
