"""How weights are fitted."""

import subprocess
import sys

MEMORY = """
import resource
from pathlib import Path
from types import SimpleNamespace
import torch
from vllm_specinfer.tuning.training import TRIM_STEPS, FreedMemory
memory = FreedMemory() if {keeps} else None
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])
for turn in range(10):
    if turn == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
kept = resident()
for step in range(1, TRIM_STEPS + 1):
    memory and memory.on_step_end(None, SimpleNamespace(global_step=step), None)
print(kept - resident())
"""


def test_freed_memory_is_taken_again_and_given_back_in_the_end():
    faults, given_back = {}, {}
    for keeps in (False, True):
        code = [sys.executable, "-c", MEMORY.format(keeps=keeps)]
        run = subprocess.run(code, capture_output=True, text=True, check=True)
        faults[keeps], given_back[keeps] = map(int, run.stdout.split())
    assert faults[True] < faults[False] / 5
    # Pages of 4 KiB.
    assert given_back[True] > 2**26 / 4096 / 2 and given_back[False] < 1000
