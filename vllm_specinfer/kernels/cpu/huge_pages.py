"""Memory in huge pages, for what every step reads from its first byte to its last.

A page of 4 KiB ends after as many bytes as a few rows take no time to multiply, and the
next one's address has to be looked up, in a virtual machine through the host's tables,
too. Linux gives pages of 2 MiB to those who ask (transparent huge pages); layers of a
small model are smaller than one, so that they share them.
"""

import contextlib
import math
import mmap

import torch

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
        return _map(taken)[:size].view(dtype)
    if taken > len(_free):
        _free = _map(_BLOCK)
    found, _free = _free[:size], _free[taken:]
    return found.view(dtype)


def _map(size: int) -> torch.Tensor:
    """[size] bytes from the first one of a huge page on."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # Not all kernels align what is mapped; what nobody writes takes no memory.
    mapped = mmap.mmap(-1, size + _PAGE, flags=flags)
    with contextlib.suppress(OSError):  # a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -block.data_ptr() % _PAGE
    return block[start : start + size]
