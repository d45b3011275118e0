"""A digest of code changes with what the code does, and with nothing else."""

import pytest

from contadj.digests import code_of

CODE = '"""A module."""\n\ndef f(x):\n    """Double x."""\n    return 2 * x\n'


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (CODE + "\n# a comment\n", True),
        (CODE.replace("A module", "Another text").replace("Double x", "Twice x"), True),
        (CODE.replace("f(x)", "f(x: float) -> float"), True),
        (CODE.replace("return 2 * x", "return (2\n            * x)"), True),
        (CODE.replace("2 * x", "3 * x"), False),
        (CODE.replace("f(x)", "f(x, y=1)"), False),
        (CODE + "\nf = f\n", False),
    ],
    ids=["comment", "docstrings", "hints", "layout", "number", "argument", "statement"],
)
def test_a_digest_follows_what_code_does(tmp_path, text, same):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(CODE)
    after.write_text(text)
    assert (code_of(before) == code_of(after)) == same
