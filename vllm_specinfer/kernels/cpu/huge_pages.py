"""Memory in huge pages, for weights and K/V, which every step reads.

A page of 4 KiB ends soon, and the next one's address has to be looked up, in a virtual
machine through the host's tables, too. Linux gives pages of 2 MiB to those who ask
(transparent huge pages, on many systems only to those).
"""

import ctypes
import math
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_PAGE = 1 << 21  # bytes of a huge page
_BLOCK = 16 * _PAGE  # that small tensors share
_LINE = 64  # bytes; what torch aligns its own tensors to

# Where the next small tensor goes. It lives as long as one that is in it.
_free = torch.empty(0, dtype=torch.uint8)


def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count] not initialised; in ordinary pages where there are no huge ones."""
    global _free
    size = count * dtype.itemsize
    taken = math.ceil(size / _LINE) * _LINE
    if taken > _BLOCK // 2:
        return _block(taken)[:size].view(dtype)
    if taken > len(_free):
        _free = _block(_BLOCK)
    found, _free = _free[:size], _free[taken:]
    return found.view(dtype)


class Zeros(TorchFunctionMode):
    """Meanwhile what `torch.zeros` returns lies in huge pages, all of it touched."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.zeros:
            return func(*args, **(kwargs or {}))
        memory = torch.empty(*args, **(kwargs or {}))
        _ask(memory)
        return memory.zero_()


def _block(size: int) -> torch.Tensor:
    """[size] bytes from the first one of a huge page on."""
    memory = torch.empty(size + _PAGE, dtype=torch.uint8)
    _ask(memory)
    start = -memory.data_ptr() % _PAGE
    return memory[start : start + size]


def _ask(memory: torch.Tensor) -> None:
    """Give whole pages back and ask for huge ones at the next touch.

    Kernels that have none, or memory that cannot be given back, leave it as it is.
    """
    start = math.ceil(memory.data_ptr() / _PAGE) * _PAGE
    size = (memory.data_ptr() + memory.nbytes - start) // _PAGE * _PAGE
    if size <= 0:
        return
    madvise = ctypes.CDLL(None).madvise
    for advice in (mmap.MADV_DONTNEED, mmap.MADV_HUGEPAGE):
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
