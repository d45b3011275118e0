"""Names of adjoints with options, and the nearest name to a misspelt one."""

import pytest

from contadj.adjoints import ADJOINTS, canonical_adjoint, parse_adjoint
from contadj.names import closest


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("DirectAdjoint", "DirectAdjoint", {}),
        ("BacksolveAdjoint( restart_every = 32 )", "BacksolveAdjoint", {"restart_every": 32}),
        ("ReversibleAdjoint(coupling=0.99)", "ReversibleAdjoint", {"coupling": 0.99}),
        ("CheckpointAdjoint(snapshots=8)", "CheckpointAdjoint", {"snapshots": 8}),
    ],
    ids=["plain", "whole number", "fraction", "snapshots"],
)
def test_an_adjoint_is_a_name_with_options(text, name, options):
    assert parse_adjoint(text) == (name, options)
    assert all(type(parse_adjoint(text)[1][key]) is type(options[key]) for key in options)


def test_an_adjoint_is_spelt_one_way():
    assert canonical_adjoint(" BacksolveAdjoint( restart_every=32.0 )") == (
        "BacksolveAdjoint(restart_every=32)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("checkpoint", r"`adjoint` must be one of .*; got 'checkpoint'; did you mean 'Check"),
        ("GaussAdjoint(n=3)", r"options of `adjoint` GaussAdjoint must be among \(\); got 'n'"),
        ("BacksolveAdjoint(restart=3)", "got 'restart'; did you mean 'restart_every'"),
        ("BacksolveAdjoint(restart_every=x)", "restart_every of .* must be a number; got 'x'"),
        ("BacksolveAdjoint(", r"`adjoint` must be NAME, NAME\(OPTION=VALUE,...\); got"),
    ],
    ids=["name", "no options", "option", "value", "syntax"],
)
def test_a_bad_adjoint_is_an_error_that_says_what_there_is(text, message):
    with pytest.raises(ValueError, match=message):
        parse_adjoint(text)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("RK4", "rk4"),
        ("pytorch", "torch"),
        ("checkpointadjoint", "CheckpointAdjoint"),
        ("gauss", "GaussAdjoint"),
        ("zzz", ""),
    ],
)
def test_the_nearest_name_is_found_whatever_the_case(name, nearest):
    hint = closest(name, ("rk4", "torch", *ADJOINTS))
    assert hint == (f"; did you mean {nearest!r}?" if nearest else "")
