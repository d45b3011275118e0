import pytest

from contadj.config import Study, load_study

FULL = """
problems = ["one", "two"]
backends = ["torch"]
engines = ["contadj"]
methods = ["rk4"]
methods_of_engine = { contadj = ["rk4"] }
steps = [32, 8, 8]
dtype = "float32"
device = "cuda:1"
adjoints = ["GaussAdjoint", "BacksolveAdjoint( restart_every=8 )"]
tolerance = 1e-6
out = "there"
jobs = 2
steps_of = { one = [4, 2] }
steps_of_method = { rk4 = [9, 3] }
quick = { steps = [4] }
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "study.toml"
        path.write_text(text)
        return path

    return write


def test_a_file_sets_every_field_and_steps_are_sorted(file):
    study = load_study(file(FULL))
    assert study.problems == ("one", "two") and study.backends == ("torch",)
    assert study.steps == (8, 32) and study.jobs == 2 and str(study.out) == "there"
    assert study.dtype == "float32" and study.device == "cuda:1"
    assert study.adjoints == ("GaussAdjoint", "BacksolveAdjoint(restart_every=8)")
    assert study.tolerance == 1e-6
    assert study.steps_of == {"one": (2, 4)} and study.steps_of_method == {"rk4": (3, 9)}


def test_the_full_file_of_this_test_has_every_field():
    assert {line.split(" = ")[0] for line in FULL.split("\n") if line} == {
        name for name in Study.model_fields if name != "study"
    }


def test_settings_given_replace_those_of_the_file_and_none_leaves_them(file):
    study = load_study(file(FULL), problems=["three"], steps=[4], dtype=None)
    assert study.problems == ("three",) and study.steps == (4,) and study.dtype == "float32"


def test_defaults_are_five_step_counts_in_double_precision():
    study = load_study(problems=["one", "one"])
    assert study.problems == ("one",)
    assert study.steps == (8, 16, 32, 64, 128) and study.dtype == "float64" and study.jobs == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("step = [8]", "unknown key 'step'; did you mean 'steps'?"),
        ("colour = 1", "unknown key 'colour'; the keys are problems, backends"),
        ("steps = []", "`steps`: Tuple should have at least 1 item"),
        ("steps = [0]", "`steps`: Input should be greater than or equal to 1; got 0"),
        ("steps = [1.5]", "`steps`: Input should be a valid integer"),
        ('steps = "8"', "`steps`: .*; got '8'"),
        ('backends = ["tensorflow"]', "`backends`: Input should be 'torch' or 'jax'; got 'tenso"),
        ('dtype = "float16"', "`dtype`: Input should be 'float64' or 'float32'; got 'float16'"),
        ('backends = ["pytorch"]', "got 'pytorch'; did you mean 'torch'?"),
        (
            'adjoints = ["Gauss"]',
            "`adjoint` must be one of .*; got 'Gauss'; did you mean 'Ga",
        ),
        ("tolerance = 0", "`tolerance`: Input should be greater than 0; got 0"),
        ("jobs = 0", "`jobs`: Input should be greater than or equal to 1; got 0"),
        ("problems = []", "`problems`: Tuple should have at least 1 item"),
        ("steps = [8", "is not TOML: "),
        ("steps_of = { one = [0] }", "`steps_of.one`: Input should be greater than or equal to 1"),
    ],
)
def test_a_bad_file_is_one_line_that_names_file_and_key(file, line, message):
    text = line if line.startswith("problems") else f'problems = ["one"]\n{line}'
    with pytest.raises(ValueError, match=f"config .*study.toml.*{message}") as caught:
        load_study(file(text))
    assert "\n" not in str(caught.value)


def test_a_study_without_problems_is_refused():
    with pytest.raises(ValueError, match=r"settings: `problems` is missing"):
        load_study()


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"config nowhere.toml: No such file"):
        load_study("nowhere.toml")
