"""Which states to keep and which steps to repeat, so that a sweep can run backward in O(K) memory.

Offline (the number of steps is known): the binomial schedule, optimal in repeated steps (Griewank &
Walther 2000, Algorithm 799: revolve, doi:10.1145/347837.347846), from the checkpoint_schedules
package. Online (it is not): evenly spaced snapshots whose spacing doubles when they are full, then
a binomial schedule inside each gap (after Stumm & Walther 2010, doi:10.1137/080742439).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpoint_schedules import (
    Copy,
    EndForward,
    EndReverse,
    Forward,
    Move,
    MultistageCheckpointSchedule,
    Reverse,
)

State = Any
Advance = Callable[[State, int, int], State]


def check_count(argument: str, value: int | None) -> None:
    """Raise unless an argument is None or a positive integer."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{argument}` must be None or a positive integer, got {value!r}")


def walk_back(
    store: OfflineSnapshots | OnlineSnapshots,
    start: State,
    advance: Advance,
    reverse: Callable[[int, State], None],
) -> None:
    """Reverse all steps; a second time too (`retain_graph`), by running forward from `start`."""
    if store.spent and store.num_steps:
        store = OfflineSnapshots(store.num_steps, store.limit)
        store.forward(start, advance)
    store.backward(advance, reverse)


class OfflineSnapshots:
    """A sweep over a known number of steps with K stored states.

    Parameters
    ----------
    num_steps : int
        Number of steps N >= 1.
    snapshots : int
        Number of states K >= 1 that may be stored.
    """

    def __init__(self, num_steps: int, snapshots: int):
        self.num_steps = num_steps
        self.limit = snapshots
        self.spent = False
        self._schedule = MultistageCheckpointSchedule(num_steps, snapshots, 0)
        self._stored: dict[int, State] = {}
        self._work: State = None
        self._final: State = None
        self._reversing = False

    def forward(self, state: State, advance: Advance) -> State:
        """Run the steps from `state` with `advance(state, n0, n1)`; return the final state."""
        self._work = state
        while True:
            action = next(self._schedule)
            if isinstance(action, EndForward):
                return self._final
            self._perform(action, advance)

    def backward(self, advance: Advance, reverse: Callable[[int, State], None]) -> None:
        """Call `reverse(n, state_n)` for n = N - 1, ..., 0, repeating steps with `advance`."""
        self.spent = True
        while True:
            action = next(self._schedule)
            if isinstance(action, EndReverse):
                return
            if isinstance(action, Reverse):
                reverse(action.n0, self._work)
                self._work = None
            else:
                self._perform(action, advance)

    def _perform(self, action: Any, advance: Advance) -> None:
        if isinstance(action, Forward):
            if action.write_ics:
                self._stored[action.n0] = self._work
            if action.write_adj_deps:
                # The one step about to be reversed; its own result matters the first time only.
                if action.n1 - action.n0 != 1:
                    raise NotImplementedError(f"expected a single step, got {action}")
                if not self._reversing:
                    self._final = advance(self._work, action.n0, action.n1)
                    self._reversing = True
            else:
                self._work = advance(self._work, action.n0, action.n1)
        elif isinstance(action, Copy):
            self._work = self._stored[action.n]
        elif isinstance(action, Move):
            self._work = self._stored.pop(action.n)
        else:
            raise NotImplementedError(f"unknown checkpointing action {action}")


class OnlineSnapshots:
    """A sweep over steps whose number is not known in advance, with K stored states.

    Parameters
    ----------
    snapshots : int
        Number of states K >= 1 that may be stored.
    """

    def __init__(self, snapshots: int):
        self.limit = snapshots
        self.spent = False
        self._spacing = 1
        self._stored: dict[int, State] = {}
        self.num_steps = 0

    def offer(self, state: State) -> None:
        """Show the state before the next step; it is stored if its turn has come."""
        n = self.num_steps
        self.num_steps += 1
        if n % self._spacing:
            return
        if len(self._stored) == self.limit:
            self._spacing *= 2
            self._stored = {m: s for m, s in self._stored.items() if m % self._spacing == 0}
            if n % self._spacing:
                return
            if len(self._stored) == self.limit:  # K = 1
                return
        self._stored[n] = state

    def backward(self, advance: Advance, reverse: Callable[[int, State], None]) -> None:
        """Call `reverse(n, state_n)` for n = N - 1, ..., 0, repeating steps with `advance`."""
        self.spent = True
        end = self.num_steps
        while self._stored:
            start, state = self._stored.popitem()
            if end > start:
                gap = OfflineSnapshots(end - start, self.limit - len(self._stored))

                def shifted(state: State, n0: int, n1: int, start: int = start) -> State:
                    return advance(state, start + n0, start + n1)

                def reversed_step(n: int, state: State, start: int = start) -> None:
                    reverse(start + n, state)

                gap.forward(state, shifted)
                gap.backward(shifted, reversed_step)
            end = start
