"""The memory of a server's processes, round by round of the same traffic.

oneDNN keeps what it made for each shape and number of rows of a matrix product, with
the holes between 0.8 MiB apiece, until there are `ONEDNN_PRIMITIVE_CACHE_CAPACITY`
of them, 1024 unless set (benchmarks/onednn_memory.py). A server that is watched runs
with `NO_CACHE`: what grows then from round to round is a leak.
"""

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

import psutil

NO_CACHE = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
LEAST_ROUNDS = 4
# What may come between two quarters at once, and what in each round. Measured in 16
# rounds: steps of at most 1.5 MiB, 0.4 MiB a round, and nothing in the last four.
NOISE_MIB, MIB_PER_ROUND = 3, 0.5


class MemoryWatch:
    """What each process held at the end of each round.

    Attributes:
        mib: By process its resident MiB, round by round.
    """

    def __init__(self) -> None:
        self.mib: dict[str, list[float]] = defaultdict(list)

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Note what each of them holds now."""
        for process in processes:
            name = f"{process.cmdline()[0].rpartition('/')[2]} {process.pid}"
            self.mib[name].append(process.memory_info().rss / 2**20)

    def check(self) -> None:
        """No process grows from the third to the last quarter of the rounds.

        Fewer than `LEAST_ROUNDS` say nothing.
        """
        for name, mib in self.mib.items():
            if len(mib) < LEAST_ROUNDS:
                continue
            quarter = len(mib) // 4
            third, last = mib[-2 * quarter : -quarter], mib[-quarter:]
            grown, most = median(last) - median(third), NOISE_MIB
            most += quarter * MIB_PER_ROUND
            assert grown <= most, (
                f"{name} must grow by at most {most} MiB in {quarter} rounds; got "
                f"{grown:.1f}, by round {[round(m, 1) for m in mib]}"
            )

    def __str__(self) -> str:
        """From the first round to the last one."""
        return ", ".join(
            f"{name} {mib[0]:.0f} to {mib[-1]:.0f} MiB"
            for name, mib in self.mib.items()
        )
