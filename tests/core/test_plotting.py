import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.figure import Figure

from contadj.orders import QUANTITIES
from contadj.plotting import convergence_figure, plot_errors
from contadj.results import Record


def records(method="rk4", order=4.0, problem="mine", floor=0.0):
    return [
        Record(
            problem=problem, framework="torch", engine="fake", method=method,
            discrete_adjoint="DirectAdjoint", continuous_adjoint="BacksolveAdjoint",
            num_steps=n, dtype="float64", device="cpu", digest="", status="ok", h=1 / n,
            mesh_size=n, **{f"{q}_relative": max(n**-order, floor) for q in QUANTITIES},
        )
        for n in (8, 16, 32, 64)
    ]  # fmt: skip


@pytest.fixture
def axes():
    return Figure().subplots()


def points(axes, face):
    """Marked points with a face of the given kind."""
    return [
        xy
        for line in axes.lines
        if line.get_marker() not in ("None", "") and len(line.get_xdata())
        for xy in zip(line.get_xdata(), line.get_ydata(), strict=True)
        if (line.get_markerfacecolor() == "white") == (face == "hollow")
    ]


def test_errors_are_drawn_against_the_step_size_on_logarithmic_axes(axes):
    plot_errors(axes, records(order=2), "discrete")
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert sorted(points(axes, "full")) == [(1 / n, n**-2) for n in (64, 32, 16, 8)]


def test_points_at_round_off_are_hollow(axes):
    plot_errors(axes, records(order=9, floor=1e-14), "gap")
    # 30 eps sqrt(M) is 3.8e-14 at M = 32; 32^-9 = 2.8e-14.
    assert sorted(points(axes, "hollow")) == [(1 / 64, 1e-14), (1 / 32, 32**-9.0)]
    assert sorted(points(axes, "full")) == [(1 / 16, 16**-9.0), (1 / 8, 8**-9.0)]


def test_a_triangle_has_the_expected_slope(axes):
    plot_errors(axes, records("rk4", 4), "discrete")
    label = next(text for text in axes.texts if text.get_text())
    triangle = next(line for line in axes.lines if line.get_color() == "0.5")
    x, y = np.log(triangle.get_xdata()), np.log(triangle.get_ydata())
    assert label.get_text() == "4"
    assert (y.max() - y.min()) / (x.max() - x.min()) == pytest.approx(4)


def test_two_methods_never_share_marker_and_line_style(axes):
    names = [f"m{i}" for i in range(12)]
    plot_errors(axes, [r for name in names for r in records(name)], "discrete")
    handles, labels = axes.get_legend_handles_labels()
    assert labels == names
    in_grey = {(handle.get_marker(), str(handle.get_linestyle())) for handle in handles}
    assert len(in_grey) == 12
    assert all(a.get_color() != b.get_color() for a, b in pairwise(handles))


def test_cells_without_a_value_are_left_out(axes):
    some = records()
    some[1] = replace(some[1], discrete_relative=None)
    some[2] = replace(some[2], discrete_relative=0.0)
    plot_errors(axes, some, "discrete")
    assert len(points(axes, "full")) == 2


def test_a_figure_has_a_row_per_problem_and_a_column_per_quantity(tmp_path):
    figure = convergence_figure(records() + records(problem="other") + records("heun2", 2.0))
    assert len(figure.axes) == 2 * len(QUANTITIES)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rk4", "heun2"]
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_of_failed_cells_only_is_drawn_empty(tmp_path):
    failed = [replace(r, **{f"{q}_relative": None for q in QUANTITIES}) for r in records()]
    convergence_figure(failed).savefig(tmp_path / "figure.png")


def test_drawing_leaves_no_global_state():
    before = "matplotlib.pyplot" in sys.modules
    convergence_figure(records())
    assert ("matplotlib.pyplot" in sys.modules) == before
