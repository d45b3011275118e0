"""Peak live bytes of a computation: what memory a gradient needs, counted and not guessed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Result = TypeVar("Result")


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators return, from the operator to their end."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self._sizes: dict[int, int] = {}
        self._older: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        # What an operator reads and was never counted is older than the call; but for `lift_fresh`,
        # which torch.tensor hands its new memory to.
        fresh = func is torch.ops.aten.lift_fresh.default
        for value in () if fresh else tree_iter((args, kwargs)):
            if isinstance(value, Tensor) and value.device.type == self._device.type:
                storage = value.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._older.add(storage)
        result = func(*args, **kwargs)
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.device.type == self._device.type:
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        counted = self._sizes.get(key)
        if counted is None:
            if storage in self._older:
                return
            weakref.finalize(storage, self._free, key).atexit = False
            counted = 0
        # An operator may have resized it.
        self._sizes[key] = size
        self.live += size - counted
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def peak_live_bytes(
    fn: Callable[[], Result], device: torch.device | str = "cpu"
) -> tuple[Result, int]:
    """Call fn and count the bytes of tensors that were alive at one time, at most.

    Memory that was there before the call is left out; what fn returns is counted. On the CPU the
    storages of all tensors that operators return are followed, those of backward passes and of
    saved activations too. Not seen there: scratch memory inside one operator, arrays of numpy, and
    the buffers of compiled functions. On a CUDA device it is the peak of the caching allocator.

    Parameters
    ----------
    fn : callable
        Called once, without arguments.
    device : torch.device or str
        Whose memory is counted.

    Returns
    -------
    result
        What fn returned.
    bytes : int

    Raises
    ------
    ValueError
        If the device is neither a CPU nor a CUDA device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = fn()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        raise ValueError(f"`device` must be a CPU or CUDA device, got {str(device)!r}")
    counter = _LiveBytes(device)
    with counter:
        result = fn()
    return result, counter.peak
