"""How weights are fitted."""

import contextlib
import subprocess
import sys

import torch

from tests import processes
from vllm_specinfer.tuning.settings import Training
from vllm_specinfer.tuning.training import fit

MEMORY = """
import resource
from pathlib import Path
from types import SimpleNamespace
import torch
from vllm_specinfer.tuning.training import TRIM_STEPS, FreedMemory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])
for keeps in (False, True):
    memory = FreedMemory() if keeps else None
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
    code = [sys.executable, "-c", MEMORY]
    run = subprocess.run(code, capture_output=True, text=True, check=True)
    faults, given_back, faults_kept, given_back_kept = map(int, run.stdout.split())
    assert faults_kept < faults / 5
    # Pages of 4 KiB.
    assert given_back_kept > 2**26 / 4096 / 2 and given_back < 1000


class Rows(torch.utils.data.Dataset):
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return i


def batches(folder, end=None, batch_size=2):
    """Rows of each step that a run trains on, which may be killed before a step."""
    found = []

    def loss(module, inputs):
        if len(found) == end:
            raise KeyboardInterrupt
        found.append(inputs["rows"].tolist())
        return module(inputs["rows"][:, None].float()).sum()

    def collate(rows):
        return {"rows": torch.tensor(rows)}

    settings = Training("", "", epochs=3, batch_size=batch_size)
    with contextlib.suppress(KeyboardInterrupt):
        fit(torch.nn.Linear(1, 1), loss, Rows(), collate, settings, folder)
    return found


def whole_and_killed(folder):
    """Batches of a run, and of others that are killed and go on, by where."""
    killed = {end: batches(folder / str(end), end) for end in (3, 8)}
    return batches(folder / "whole"), {
        end: [*before, *batches(folder / str(end))] for end, before in killed.items()
    }


def test_a_killed_run_goes_on_in_the_order_of_its_epoch(tmp_path):
    # In a process of its own: `fit` has it keep its memory.
    env = {"VLLM_LOGGING_LEVEL": "ERROR"}
    whole, killed = processes.call(whole_and_killed, tmp_path, **env)
    epochs = [whole[i : i + 5] for i in (0, 5, 10)]
    assert all(sorted(sum(epoch, [])) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert killed == {3: whole, 8: whole}


def killed_twice(folder):
    """Batches of a run that is killed in batches of two, and twice in ones of one."""
    batches(folder / "killed", 8)
    found = [batches(folder / "killed", end, batch_size=1) for end in (11, None)]
    return batches(folder / "whole", batch_size=1), [*found[0], *found[1]]


def test_checkpoints_of_other_batches_are_not_gone_on_from(tmp_path):
    env = {"VLLM_LOGGING_LEVEL": "ERROR"}
    whole, killed = processes.call(killed_twice, tmp_path, **env)
    assert len(whole) == 30
    # Every third step is written down.
    assert killed[:9] + killed[11:] == whole


def fitted_by_another_optimizer(folder):
    """What makes the optimizer gets, the weights before and after, and the losses."""
    module, given = torch.nn.Linear(1, 1), []
    before = module.weight.tolist()

    def still(module, *numbers):
        given.append(numbers)
        return torch.optim.SGD(module.parameters(), lr=0.0)

    def loss(module, inputs):
        return module(inputs["x"]).sum() * 0 + 2

    def collate(rows):
        return {"x": torch.ones(len(rows), 1)}

    settings = Training("", "", epochs=1, batch_size=2, learning_rate=0.5)
    losses = fit(module, loss, Rows(), collate, settings, folder, still)
    return given, before, module.weight.tolist(), losses


def test_another_optimizer_makes_the_steps(tmp_path):
    env = {"VLLM_LOGGING_LEVEL": "ERROR"}
    given, before, after, losses = processes.call(
        fitted_by_another_optimizer, tmp_path / "run", **env
    )
    assert given == [(0.5, 0.01)] and before == after
    assert losses == [(step, 2.0) for step in range(1, 6)]
