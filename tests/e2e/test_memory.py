"""The soak's memory check finds a leak, and nothing where there is none."""

import mmap
import os

import psutil
import pytest

from tests.e2e.memory import LEAST_ROUNDS, MemoryWatch


def watch(mib: list[float]) -> MemoryWatch:
    found = MemoryWatch()
    found.mib["worker"] = mib
    found.mib["front end"] = [300.0] * len(mib)
    return found


@pytest.mark.parametrize("rounds", [LEAST_ROUNDS, 17, 40])
def test_a_leak_of_five_mib_a_round_is_found_in_one_of_several_processes(rounds):
    with pytest.raises(AssertionError, match="worker must grow by at most"):
        watch([900 + 5.0 * i + i % 2 for i in range(rounds)]).check()


@pytest.mark.parametrize("rounds", [17, 40])
def test_memory_that_levels_off_is_no_leak(rounds):
    watch([900 - 80 * 0.5**i + i % 2 for i in range(rounds)]).check()


def test_what_processes_hold_is_looked_up():
    found = MemoryWatch()
    found.look([psutil.Process(os.getpid())])
    # New pages: those of freed memory may be held already.
    kept = mmap.mmap(-1, 40 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for _ in range(40):
        kept.write(b"x" * (1 << 20))
    found.look([psutil.Process(os.getpid())])
    (mib,) = found.mib.values()
    assert len(kept) / 2**20 - 5 < mib[1] - mib[0]
