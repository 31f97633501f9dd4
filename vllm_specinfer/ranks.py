"""What the ranks of a tensor-parallel group have to know alike.

Every rank drafts and verifies for itself. From the same numbers each comes to the same
trees; what is not the same everywhere, as clocks and files, the first rank says.
"""

from typing import TypeVar

from vllm.distributed.parallel_state import get_tp_group

T = TypeVar("T")


def of_first_rank(value: T) -> T:
    """The first rank's value; all ranks must ask, in the same order."""
    return get_tp_group().broadcast_object(value, src=0)


def is_first_rank() -> bool:
    """This rank is the first one, which alone writes what all of them have learned."""
    return get_tp_group().is_first_rank
