"""What the summary says in plain words, on errors that are known."""

import re
from dataclasses import replace

import pytest

from contadj.convergence import order_rows
from contadj.results import CellRecord, Record
from contadj.summary import Line, adjoint_columns, in_words, steps_for_adjoints

EPS = 2.0**-52


def records(error, steps=(8, 16, 32, 64, 128), dtype="float64", method="rk4"):
    """Records whose discrete error is `error(h)` and whose continuous one is twice that."""
    return [
        Record(
            problem="mine", framework="torch", engine="contadj", method=method,
            discrete_adjoint="DirectAdjoint", continuous_adjoint="BacksolveAdjoint", num_steps=n,
            dtype=dtype, device="cpu", digest="", status="ok", h=2 / n, mesh_size=n,
            discrete_relative=error(2 / n), continuous_relative=2 * error(2 / n),
            reference_error=0.0,
        )
        for n in steps
    ]  # fmt: skip


def words(cells, tolerance=None, quantity="discrete"):
    (row,) = (row for row in order_rows(cells) if row.quantity == quantity)
    return in_words(cells, row, tolerance)


def test_the_order_the_step_and_the_start_of_round_off_are_named():
    # Round-off is 30 eps sqrt(128) = 7.5e-14 at 128 steps, where the error is 6.0e-14.
    said = words(records(lambda h: max(1e-6 * h**4, 1e-15)), tolerance=1e-9)
    assert said == (
        "rk4 discrete: order 4.00, 4 expected; round-off from 128 steps, h = 0.016 on; "
        "error 1e-09 with 16 steps, h = 0.12"
    )


def test_a_tolerance_beyond_the_grid_is_extrapolated_by_the_order_seen():
    # h^4 = 1e-8 at h = 0.01, which is 200 steps.
    said = words(records(lambda h: h**4), tolerance=1e-8)
    assert "error 1e-08 beyond the study, by the order seen with about 200 steps, h = 0.01" in said


def test_round_off_beyond_the_grid_is_where_the_error_meets_its_square_root_law():
    said = words(records(lambda h: h**4))
    found = re.search(r"round-off beyond the study, from about ([\d,]+) steps", said)
    n = float(found[1].replace(",", ""))
    assert (2 / n) ** 4 == pytest.approx(30 * EPS * n**0.5, rel=0.3)


def test_a_tolerance_below_round_off_is_not_reached():
    at_round_off = records(lambda h: max(1e-6 * h**4, 2e-14))
    assert words(at_round_off, 1e-15).endswith("error 1e-15 not reached above round-off")
    assert words(records(lambda h: h**4), 1e-14).endswith("not reached above round-off")


def test_the_continuous_gradient_has_words_of_its_own():
    said = words(records(lambda h: h**4), 2.1e-6, quantity="continuous")
    assert said.startswith("rk4 continuous: order 4.00") and "with 64 steps" in said


def test_errors_that_grow_reach_nothing():
    cells = records(lambda h: 1e-3 / h)
    assert words(cells, 1e-6) == (
        "rk4 discrete: order -1.00, 4 expected; error 1e-06 not reached above round-off"
    )


def test_without_a_value_no_order_is_seen():
    cells = [replace(cell, discrete_relative=None) for cell in records(lambda h: h**4)]
    assert words(cells, 1e-3) == (
        "rk4 discrete: no order seen, no cell has a value; error 0.001 not reached above round-off"
    )


def test_a_method_without_a_statement_shows_its_order_alone():
    assert words(records(lambda h: h**3, method="mystery")).startswith(
        "mystery discrete: order 3.00; round-off"
    )


@pytest.mark.parametrize(
    ("tolerance", "steps"), [(None, 128), (1e-4, 32), (1e-9, 128)],
    ids=["none", "on the grid", "beyond the grid"],
)  # fmt: skip
def test_adjoints_are_compared_where_the_discrete_gradient_reaches_the_tolerance(tolerance, steps):
    cells = records(lambda h: h**4)
    assert steps_for_adjoints(cells, order_rows(cells), tolerance) == {
        ("mine", "torch", "contadj", "rk4"): steps
    }


def test_a_missing_error_is_stepped_over():
    line = Line([8, 16, 32], [0.25, 0.125, 0.0625], [None, 1e-3, 1e-5], [1e-13] * 3, 4.0)
    assert line.reaches(1e-4).num_steps == 32 and line.reaches(1e-4).measured


def record(**values):
    found = {
        "error": 1.234e-7, "reversal_error": None, "f_evaluations_forward": 128,
        "f_evaluations_backward": 384, "gradient_seconds": 0.0256, "peak_bytes": 3150,
    }  # fmt: skip
    return CellRecord(
        study="adjoints", cell={"adjoint": "GaussAdjoint"}, digest="", status="ok",
        values=found | values,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({}, ("1.2e-07", "-", "25.6 ms", "3.15 kB")),
        ({"reversal_error": 2e-3}, ("1.2e-07", "2.0e-03", "25.6 ms", "3.15 kB")),
        ({"gradient_seconds": 61.2, "peak_bytes": None}, ("1.2e-07", "-", "61.2 s", "-")),
        ({"gradient_seconds": 2e-5, "peak_bytes": 8}, ("1.2e-07", "-", "20 µs", "8 B")),
        ({"peak_bytes": 2_500_000_000}, ("1.2e-07", "-", "25.6 ms", "2.5 GB")),
    ],
    ids=["plain", "reversal", "no bytes", "small", "large"],
)
def test_a_row_of_the_table_of_adjoints_has_readable_units(values, shown):
    adjoint, error, reversal, evaluations, seconds, memory = adjoint_columns(record(**values))
    assert (adjoint, evaluations) == ("GaussAdjoint", "128 + 384")
    assert (error, reversal, seconds, memory) == shown


def test_evaluations_that_nobody_counted_are_a_question_mark():
    assert adjoint_columns(record(f_evaluations_forward=None))[3] == "? + 384"


def test_an_adjoint_that_failed_has_its_status_in_the_table():
    failed = replace(record(), status="diverged", values={})
    assert adjoint_columns(failed) == ("GaussAdjoint", "diverged", "", "", "", "")
