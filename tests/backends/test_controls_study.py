"""The study of control gradients: its statements, its reference, its twins, and what it shows."""

import pytest

from contadj.studies import controls
from contadj.tableaus import get_tableau

ROOT = __file__.rpartition("/tests/")[0]
STATED = {
    "heun2": [2, 2],
    "rk4_classic": [3, 2, 2, 4],
    "rk4": [2, 2, 2, 4],
    "gl4": [3, 3],
    "radauIIA3": [2, 2],
    "trapezoid": [1, 1],
    "ralston": [1, 1],
    "bosh3": [1, 1, 1, None],
    "sdirk2": [1, 1],
    "midpoint": [None, 1],
    "heun3": [1, None, 1],
    "dopri5": [2, None, 2, 2, 2, 5, None],
}


@pytest.mark.parametrize("method", STATED)
def test_the_conditions_on_a_tableau_give_the_orders_stated_stage_by_stage(method):
    tableau = get_tableau(method)
    orders = [controls.stage_order(tableau, i) for i in range(tableau.stages)]
    assert orders == STATED[method]
