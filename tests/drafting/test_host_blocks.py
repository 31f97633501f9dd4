"""The host's block table is the device's, read where a request has new blocks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_specinfer.drafting import blocks

SLOTS, MOST_BLOCKS = 5, 9


@pytest.fixture
def reads(monkeypatch):
    """Rows that are read from a device whose memory is not the host's."""
    found = []
    read = blocks.read

    def noted(tensor):
        found.append(len(tensor))
        return (read(tensor)[0].copy(),)

    monkeypatch.setattr(blocks, "is_host", lambda device: False)
    monkeypatch.setattr(blocks, "read", noted)
    return found


class Engine:
    """What vLLM's runner does with its block table."""

    def __init__(self):
        self.table = torch.zeros(SLOTS, MOST_BLOCKS, dtype=torch.int32)
        self.counts = np.zeros((1, SLOTS), np.int32)
        tables = SimpleNamespace(
            block_tables=[SimpleNamespace(gpu=self.table)],
            num_blocks=SimpleNamespace(np=self.counts),
        )
        self.host = blocks.HostBlocks(tables, 0)
        self.next_block = 0

    def grow(self, slot, count):
        start = self.counts[0, slot]
        for i in range(start, start + count):
            self.next_block += 1
            self.table[slot, i] = self.next_block
        self.counts[0, slot] += count

    def start(self, slot, count):
        self.host.forget(slot)
        self.counts[0, slot] = 0
        self.grow(slot, count)

    def give_back(self, slot, count):
        self.host.forget(slot)
        self.counts[0, slot] -= count

    def check(self, slots):
        slots = np.array(slots)
        self.host.update(slots)
        for slot in slots.tolist():
            held = self.counts[0, slot]
            assert self.host.table[slot, :held].tolist() == (
                self.table[slot, :held].tolist()
            )
        assert self.host.held(slots).tolist() == self.counts[0, slots].tolist()
        assert self.host.rows(slots).equal(self.table[slots])


def test_rows_are_those_of_the_device_whatever_happens(reads):
    rng = np.random.default_rng(0)
    engine = Engine()
    for _ in range(200):
        slot = int(rng.integers(SLOTS))
        if rng.random() < 0.3 or engine.counts[0, slot] == MOST_BLOCKS:
            # As many blocks as the request before, now and then.
            engine.start(slot, int(rng.integers(1, 4)))
        elif rng.random() < 0.3:
            # And takes others, as many, before anybody looks.
            engine.give_back(slot, min(1, engine.counts[0, slot]))
            engine.grow(slot, 1)
        else:
            engine.grow(slot, 1)
        engine.check(rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)])


def test_only_rows_that_have_grown_are_read(reads):
    engine = Engine()
    for slot in range(SLOTS):
        engine.start(slot, 2)
    engine.check(range(SLOTS))
    engine.check(range(SLOTS))
    engine.grow(3, 1)
    engine.check([1, 3])
    assert reads == [SLOTS, 1]


def test_on_a_cpu_the_table_is_the_devices_own():
    engine = Engine()
    assert np.shares_memory(engine.host.table, engine.table.numpy())
    engine.start(0, 3)
    engine.check([0])
