"""How weights are fitted."""

import subprocess
import sys

PAGE_FAULTS = """
import resource
import torch
from vllm_specinfer.tuning.training import keep_freed_memory
if {keeps}:
    keep_freed_memory()
for round in range(10):
    if round == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_taken_again():
    faults = {}
    for keeps in (False, True):
        code = PAGE_FAULTS.format(keeps=keeps)
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        faults[keeps] = int(run.stdout)
    assert faults[True] < faults[False] / 5
