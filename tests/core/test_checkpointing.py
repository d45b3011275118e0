"""Snapshots: the number of repeated steps, the states held, the order of the reversal."""

from math import comb

import pytest

from contadj.checkpointing import OfflineSnapshots, OnlineSnapshots, check_count


def fewest_steps(num_steps, snapshots):
    """Forward steps of a whole reversal by Griewank's binomial formula.

    With beta(s, r) = C(s + r, s), r the least number with N <= beta(s, r), every step is taken at
    most r times and t(N, s) = r N - beta(s + 1, r - 1) steps are taken before reversals, the one
    just before its own reversal not counted.
    """
    r = 0
    while comb(snapshots + r, snapshots) < num_steps:
        r += 1
    return r * num_steps - comb(snapshots + r, r - 1) if r else 0


class Walk:
    """A state is the number of its step; every advance and reversal is written down."""

    def __init__(self):
        self.advanced = 0
        self.reversed = []
        self.last_states = []

    def advance(self, state, n0, n1):
        assert state == n0
        self.advanced += n1 - n0
        return n1

    def reverse(self, n, state):
        assert state == n
        self.reversed.append(n)


CASES = [(1, 1), (2, 1), (7, 1), (7, 2), (10, 3), (35, 3), (36, 3), (64, 8), (100, 5), (20, 40)]


@pytest.mark.parametrize(("num_steps", "snapshots"), CASES)
def test_offline_repeats_as_few_steps_as_griewanks_formula(num_steps, snapshots):
    walk = Walk()
    store = OfflineSnapshots(num_steps, snapshots)
    assert store.forward(0, walk.advance) == num_steps
    store.backward(walk.advance, walk.reverse)
    # The last step of the forward pass yields the final state; the formula leaves it out.
    assert walk.advanced == fewest_steps(num_steps, snapshots) + 1
    assert walk.reversed == list(range(num_steps))[::-1]


@pytest.mark.parametrize(("num_steps", "snapshots"), CASES)
def test_offline_holds_no_more_states_than_it_may(num_steps, snapshots):
    held = []

    def advance(state, n0, n1):
        held.append(len(store._stored))
        return n1

    store = OfflineSnapshots(num_steps, snapshots)
    store.forward(0, advance)
    held.append(len(store._stored))
    store.backward(advance, lambda n, state: held.append(len(store._stored)))
    assert max(held) <= snapshots
    assert store._stored == {}


@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 16, 40])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 15, 16, 17, 33, 100])
def test_online_reverses_every_step_once_in_order(num_steps, snapshots):
    walk = Walk()
    store = OnlineSnapshots(snapshots)
    for n in range(num_steps):
        store.offer(n)
        assert 1 <= len(store._stored) <= snapshots
    store.backward(walk.advance, walk.reverse)
    assert walk.reversed == list(range(num_steps))[::-1]


@pytest.mark.parametrize("num_steps", [17, 64, 200, 1000])
def test_online_is_within_a_small_factor_of_the_offline_optimum(num_steps):
    walk = Walk()
    store = OnlineSnapshots(16)
    for n in range(num_steps):
        store.offer(n)
    store.backward(walk.advance, walk.reverse)
    # The forward pass itself is num_steps and was not counted by `offer`.
    assert walk.advanced + num_steps <= 3 * fewest_steps(num_steps, 16)


def test_online_without_steps_reverses_nothing():
    walk = Walk()
    OnlineSnapshots(3).backward(walk.advance, walk.reverse)
    assert walk.reversed == []


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "3"])
def test_a_count_that_is_no_positive_integer_is_refused_by_name(value):
    with pytest.raises(ValueError, match="`snapshots` must be None or a positive integer, got"):
        check_count("snapshots", value)
