"""Binomial checkpointing: reverse N steps with K stored states and the fewest recomputed steps.

With s stored states, the first one included, N steps can be reversed so that no step is run forward
more than r times if and only if  N <= beta(s, r) = (s + r)! / (s! r!),  and the fewest forward
steps for that are  r N - beta(s + 1, r - 1).

References
----------
Griewank & Walther, Algorithm 799: Revolve, ACM Trans. Math. Softw. 26 (2000),
doi:10.1145/347837.347846.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import comb
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _tree

PyTree = Any
_LARGEST = np.iinfo(np.int32).max


def fewest_steps(num_steps: int, snapshots: int) -> int:
    """Forward steps that reversing `num_steps` steps takes with `snapshots` stored states.

    The step evaluated inside each pull-back is not counted.
    """
    if num_steps <= 1:
        return 0
    r = 0
    while comb(snapshots + r, snapshots) < num_steps:
        r += 1
    return r * num_steps - comb(snapshots + r, snapshots + 1)


@lru_cache(maxsize=64)
def _binomials(most_steps: int, snapshots: int) -> np.ndarray:
    """beta(s, r) for s <= `snapshots`, as far in r as s = 2 needs, capped at the largest int32."""
    columns = 2
    while comb(columns + 1, 2) < most_steps:
        columns += 1
    table = np.ones((snapshots + 1, columns + 1), dtype=np.int32)
    for s in range(1, snapshots + 1):
        for r in range(1, columns + 1):
            table[s, r] = min(int(table[s - 1, r]) + int(table[s, r - 1]), _LARGEST)
    return table


class Schedule:
    """Where to store states, for at most `most_steps` steps and `snapshots` stored states."""

    def __init__(self, most_steps: int, snapshots: int):
        self.snapshots = snapshots
        self._table = _binomials(most_steps, snapshots)

    def split(self, length, stored):
        """Steps from a stored state to the next state worth storing.

        `length` steps follow the stored state, and `stored` >= 2 states may be used, it included.
        """
        table = jnp.asarray(self._table)
        r = jnp.maximum(jnp.sum(table[stored] < length), 1)
        # Any split that leaves at most beta(s, r-1) steps on the left and beta(s-1, r) on the
        # right is optimal; this is the shortest left part.
        shortest = jnp.where(r >= 2, table[stored, jnp.maximum(r - 2, 0)], 1)
        return jnp.clip(jnp.maximum(shortest, length - table[stored - 1, r]), 1, length - 1)

    def first_sweep(self, num_steps):
        """Indices of the states to store in the first sweep, and how many there are.

        Returns
        -------
        indices : (K,) int array
            Increasing; entries after the last one used are -1.
        count : int array
        """

        def body(k, carry):
            indices, count = carry
            last = indices[k - 1]
            length = num_steps - last
            more = (count == k) & (length >= 2)
            step = self.split(jnp.maximum(length, 2), self.snapshots - k + 1)
            return (
                indices.at[k].set(jnp.where(more, last + step, -1)),
                count + jnp.where(more, 1, 0),
            )

        indices = jnp.full(self.snapshots, -1, jnp.int32).at[0].set(0)
        return lax.fori_loop(1, self.snapshots, body, (indices, jnp.int32(1)))


def reverse(
    schedule: Schedule,
    num_steps,
    indices,
    count,
    stored: PyTree,
    advance: Callable[[Any, PyTree], PyTree],
    pull: Callable[[Any, PyTree, PyTree], PyTree],
    carry: PyTree,
) -> tuple[PyTree, Any]:
    """Call `pull(i, state_i, carry)` for i = num_steps - 1, ..., 0.

    Parameters
    ----------
    schedule : Schedule
    num_steps : int array
        Number of steps N.
    indices : (K,) int array
        Indices of the states stored so far, increasing, starting with 0.
    count : int array
        How many of them are in use.
    stored : pytree, leading axis K
        The states stored so far.
    advance : callable
        `advance(i, state_i) -> state_{i+1}`.
    pull : callable
        `pull(i, state_i, carry) -> carry`.
    carry : pytree
        What the pull-backs accumulate.

    Returns
    -------
    carry : pytree
    advanced : int array
        Number of recomputed forward steps.
    """

    def more(loop):
        return loop[0] > 0

    def body(loop):
        n, indices, top, stored, carry, advanced = loop
        i = indices[top]
        length = n - i
        free = schedule.snapshots - 1 - top
        store = (length >= 2) & (free > 0)
        if schedule.snapshots > 1:
            split = schedule.split(jnp.maximum(length, 2), jnp.maximum(free + 1, 2))
        else:
            split = length - 1
        target = jnp.where(store, i + split, n - 1)
        state = lax.fori_loop(i, target, advance, _tree.read(stored, top))
        slot = jnp.where(store, top + 1, top)

        def keep(operand):
            stored, carry = operand
            return _tree.write(stored, slot, state), carry

        def turn(operand):
            stored, carry = operand
            return stored, pull(n - 1, state, carry)

        stored, carry = lax.cond(store, keep, turn, (stored, carry))
        indices = indices.at[slot].set(jnp.where(store, target, i))
        # A stored state is done with once its own step has been pulled back.
        top = jnp.where(store, slot, jnp.where(length == 1, top - 1, top))
        n = jnp.where(store, n, n - 1)
        return n, indices, top, stored, carry, advanced + (target - i)

    start = (jnp.asarray(num_steps, jnp.int32), indices, count - 1, stored, carry, jnp.int32(0))
    *_, carry, advanced = lax.while_loop(more, body, start)
    return carry, advanced
