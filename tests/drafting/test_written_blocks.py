"""An SSM reads on from where its own K/V ends, not from where the target's does."""

import random

import numpy as np
import pytest

from vllm_specinfer.drafting.written_blocks import WrittenBlocks

SIZE = 4
GARBAGE = None


class Cache:
    """KV slots that remember the prefix they were written for, as an SSM's K/V does."""

    def __init__(self, num_blocks):
        self.slots = [GARBAGE] * (num_blocks * SIZE)
        self.written = WrittenBlocks(num_blocks, SIZE, max_num_reqs=1)

    def slot(self, blocks, position):
        return blocks[position // SIZE] * SIZE + position % SIZE

    def write(self, blocks, values, first):
        """Write values at positions from `first` on."""
        slots = [self.slot(blocks, first + i) for i in range(len(values))]
        for slot, value in zip(slots, values, strict=True):
            self.slots[slot] = value

    def read(self, blocks, tokens, first):
        """Run the SSM over a request's tokens from `first` on."""
        values = [tuple(tokens[: p + 1]) for p in range(first, len(tokens))]
        self.write(blocks, values, first)
        self.written.complete(0, np.array(blocks), np.array(tokens, np.int32))

    def valid(self, blocks, tokens):
        """Tokens in the leading blocks that are wholly of this prefix."""
        num = 0
        for p in range(len(tokens) // SIZE * SIZE):
            if self.slots[self.slot(blocks, p)] != tuple(tokens[: p + 1]):
                break
            num += 1
        return num // SIZE * SIZE


@pytest.mark.parametrize("seed", range(20))
def test_exactly_what_the_ssm_has_written_counts_as_cached(seed):
    rng = random.Random(seed)
    cache = Cache(num_blocks=12)
    # Few distinct texts with common beginnings, in blocks that are reused all the time.
    texts = [[rng.randrange(2) for _ in range(5 * SIZE)] for _ in range(3)]
    lengths = []
    for _ in range(200):
        tokens = rng.choice(texts)[: rng.randrange(1, 5 * SIZE)]
        blocks = rng.sample(range(12), 6) if rng.random() < 0.2 else list(range(6))
        cached = tokens[: rng.randrange(len(tokens) + 1) // SIZE * SIZE]
        first = cache.written.start(0, blocks, cached)
        assert first == cache.valid(blocks, cached)
        lengths.append(first)
        # The others of its blocks are new ones, of whatever text.
        for position in range(first, 6 * SIZE):
            cache.slots[cache.slot(blocks, position)] = GARBAGE
        if rng.random() < 0.03:  # sleeps
            cache.slots = [GARBAGE] * len(cache.slots)
            cache.written.forget_all()
        if rng.random() < 0.3:
            continue  # the SSM sits this request out
        cache.read(blocks, tokens, first)
        scratch = rng.randrange(1, 2 * SIZE)
        cache.write(blocks, [GARBAGE] * min(scratch, 24 - len(tokens)), len(tokens))
    assert len(set(lengths)) > 2  # none, some and many
