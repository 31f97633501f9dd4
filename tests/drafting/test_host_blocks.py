"""The host's block table is the device's, though nobody reads that."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_specinfer.drafting.host_blocks import HostBlocks

SLOTS, MOST_BLOCKS, GROUP = 5, 9, 1


class Engine:
    """What vLLM's runner does with its block table of the second of two groups."""

    def __init__(self):
        self.table = torch.zeros(SLOTS, MOST_BLOCKS, dtype=torch.int32)
        self.counts = np.zeros((2, SLOTS), np.int32)
        tables = SimpleNamespace(
            block_tables=[None, SimpleNamespace(gpu=self.table)],
            num_blocks=SimpleNamespace(np=self.counts),
        )
        self.host = HostBlocks(tables, GROUP)
        self.next_block = 0

    def new_blocks(self, count):
        first, self.next_block = self.next_block + 1, self.next_block + count
        return [0] * count, list(range(first, first + count))

    def write(self, slot, blocks):
        start = self.counts[GROUP, slot]
        self.table[slot, start : start + len(blocks[GROUP])] = torch.tensor(
            blocks[GROUP], dtype=torch.int32
        )
        self.counts[GROUP, slot] += len(blocks[GROUP])

    def grow(self, slot, count):
        blocks = self.new_blocks(count)
        self.host.append(slot, blocks)
        self.write(slot, blocks)

    def start(self, slot, count):
        blocks = self.new_blocks(count)
        self.host.start(slot, blocks)
        self.counts[GROUP, slot] = 0
        self.write(slot, blocks)

    def give_back(self, slot, count):
        self.counts[GROUP, slot] -= count

    def check(self, slots):
        slots = np.array(slots)
        for slot in slots.tolist():
            held = self.counts[GROUP, slot]
            assert self.host.table[slot, :held].tolist() == (
                self.table[slot, :held].tolist()
            )
        assert self.host.held(slots).tolist() == self.counts[GROUP, slots].tolist()
        assert self.host.rows(slots).equal(self.table[slots])


def test_rows_are_those_of_the_device_whatever_happens():
    rng = np.random.default_rng(0)
    engine = Engine()
    for _ in range(200):
        slot = int(rng.integers(SLOTS))
        if rng.random() < 0.3 or engine.counts[GROUP, slot] == MOST_BLOCKS:
            # As many blocks as the request before, now and then.
            engine.start(slot, int(rng.integers(1, 4)))
        elif rng.random() < 0.3:
            # And takes others, as many, before anybody looks.
            engine.give_back(slot, min(1, engine.counts[GROUP, slot]))
            engine.grow(slot, 1)
        else:
            engine.grow(slot, 1)
        engine.check(rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)])
