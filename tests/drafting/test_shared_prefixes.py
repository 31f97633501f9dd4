"""What several requests hold in vLLM's prefix cache is read once, and for all of them.

Passes are played: each row notes its text, and whether a head had the target's state of
its token, in the slot that it writes.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.drafting.test_ssm import MAX_LEN, SIZE, draft_kv
from vllm_specinfer.drafting.eagle import EagleHead
from vllm_specinfer.drafting.ssm import NeuralSSM

SLOTS = 5
MOST_ROWS, ROWS_PER_STEP = 11, 9
PREFIX = [i % 7 for i in range(6 * SIZE)]


class Engine:
    """vLLM's blocks: whole ones of a text are cached as soon as it is scheduled."""

    def __init__(self, kind):
        self.ssm = ssm = object.__new__(kind)
        ssm.device, ssm.model = torch.device("cpu"), SimpleNamespace()
        ssm.rows_per_step = ROWS_PER_STEP
        ssm._width, ssm._dtype, ssm._most_kept = 1, torch.float32, 99
        ssm._kept, ssm._num_kept = {}, 0
        ssm.kv = draft_kv(SLOTS, ssm.lookahead)
        ssm._run_rows, ssm._last = self._run_rows, lambda *_: None
        self.memory = {}
        self.texts, self.blocks, self.cached, self.computed = {}, {}, {}, {}
        self.free, self.num_rows = list(range(SLOTS * MAX_LEN // SIZE)), 0

    def _run_rows(self, rows, states):
        """As in vLLM, each piece writes its K/V before anything is attended to."""
        self.num_rows += len(rows.tokens)
        begin = 0
        for piece in rows.pieces(MOST_ROWS):
            of_rows = np.repeat(piece.slots, np.diff(piece.starts)).tolist()
            for i, (slot, position) in enumerate(
                zip(of_rows, piece.positions, strict=True)
            ):
                has_state = states is None or bool(states[begin + i])
                self.memory[piece.kv_slots[i]] = self.text(slot, position), has_state
            begin += len(of_rows)
            for slot, seq_len in zip(piece.slots, piece.seq_lens, strict=True):
                assert self.is_read(slot, seq_len)

    def text(self, slot, row):
        return tuple(self.texts[slot][: row + 1 + self.ssm.lookahead])

    def found(self, slot, row):
        block = self.blocks[slot][row // SIZE]
        return self.memory.get(block * SIZE + row % SIZE)

    def is_read(self, slot, num_rows):
        rows = [self.found(slot, row) for row in range(num_rows)]
        return [row and row[0] for row in rows] == [
            self.text(slot, row) for row in range(num_rows)
        ]

    def start(self, slot, text, most=MAX_LEN):
        """A request; the longest cached beginning of its text but the last token."""
        cached, hits = [], {}
        for other in self.texts:
            for i in range(self.computed[other] // SIZE):
                hits[tuple(self.texts[other][: (i + 1) * SIZE])] = self.blocks[other][i]
        while (end := (len(cached) + 1) * SIZE) < len(text):
            if (block := hits.get(tuple(text[:end]))) is None:
                break
            cached.append(block)
        more = len(text) // SIZE + 2 - len(cached)
        new, self.free = self.free[:more], self.free[more:]
        self.blocks[slot], self.texts[slot] = cached + new, list(text)
        self.computed[slot] = self.cached[slot] = len(cached) * SIZE
        request = SimpleNamespace(
            block_ids=[self.blocks[slot]],
            num_computed_tokens=self.cached[slot],
            prefill_token_ids=self.texts[slot],
        )
        self.ssm.kv.blocks._counts[slot] = len(self.blocks[slot])
        self.ssm.start(slot, request)
        self.schedule(slot, most)

    def schedule(self, slot, most=MAX_LEN):
        self.computed[slot] = min(len(self.texts[slot]), self.computed[slot] + most)

    def end(self, slot):
        kept = {
            block
            for other in self.blocks
            if other != slot
            for block in self.blocks[other]
        }
        self.free += [block for block in self.blocks[slot] if block not in kept]
        for of_slots in (self.texts, self.blocks, self.cached, self.computed):
            del of_slots[slot]

    def step(self, slots, before=None):
        """The batch: each text has one token behind what has been computed."""
        before = self.cached if before is None else before
        counts = []
        for slot in slots:
            counts.append(self.computed[slot] - before[slot])
            if self.computed[slot] == len(self.texts[slot]):
                self.texts[slot].append(8 + slot)
        tokens = np.zeros((SLOTS, MAX_LEN), np.int32)
        for slot, text in self.texts.items():
            tokens[slot, : len(text)] = text
        return SimpleNamespace(
            slots=np.array(slots),
            growing=np.arange(len(slots)),
            num_tokens=np.array([self.computed[slot] + 1 for slot in slots]),
            all_token_ids=tokens,
            states=torch.ones(sum(counts), 1),
            state_starts=np.cumsum([0, *counts]),
        )


def num_unread(engine, step):
    """Rows that these requests are to read, all together."""
    ends = step.num_tokens - engine.ssm.lookahead
    _, first = engine.ssm.kv.unread(step.slots, ends)
    return int((ends - first).clip(0).sum())


def kinds():
    return pytest.mark.parametrize("kind", [NeuralSSM, EagleHead])


@kinds()
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 3, 1, 0]])
@pytest.mark.parametrize("sits_out", [False, True])
def test_a_prefix_of_many_is_read_once(kind, order, sits_out):
    engine = Engine(kind)
    for slot in range(4):
        engine.start(slot, [*PREFIX, 9, slot, slot])
    step = engine.step(order)
    assert list(engine.cached.values()) == [0] + 3 * [len(PREFIX)]
    if sits_out:
        engine.ssm.skip(step)
        before = dict(engine.computed)
        for slot in order:
            engine.schedule(slot)
        step = engine.step(order, before)
    ends = step.num_tokens - kind.lookahead
    own_rows = int((ends - len(PREFIX)).sum())
    assert num_unread(engine, step) == len(PREFIX) + own_rows
    engine.ssm.catch_up(step)
    assert engine.num_rows == len(PREFIX) + own_rows
    assert num_unread(engine, step) == 0
    for slot, end in zip(order, ends, strict=True):
        assert engine.is_read(slot, end)
        assert all(engine.found(slot, row)[1] for row in range(end))


@kinds()
def test_each_part_is_read_for_the_request_that_has_its_states(kind):
    """The second goes on with the first one's text, the third with the second's."""
    engine = Engine(kind)
    for slot, end in enumerate([5, 9, 13]):
        engine.start(slot, PREFIX[:end])
    assert list(engine.cached.values()) == [0, 4, 8]
    engine.ssm.catch_up(engine.step([2, 0, 1]))
    for slot in range(3):
        end = engine.computed[slot] - kind.lookahead
        assert all(engine.found(slot, row)[1] for row in range(end))


def test_a_prefix_is_read_in_pieces_for_all():
    engine = Engine(NeuralSSM)
    for slot in range(4):
        engine.start(slot, [*PREFIX, 9, slot, slot])
    step = engine.step([3, 1, 0, 2])
    unread = num_unread(engine, step)
    while engine.ssm.is_far_behind(step):
        engine.ssm.read_some(step)
        engine.ssm.skip(step)
        unread -= ROWS_PER_STEP
        assert num_unread(engine, step) == unread
    assert engine.num_rows + unread == len(PREFIX) + 4 * 4
    engine.ssm.catch_up(step)
    for slot in range(4):
        assert engine.is_read(slot, engine.computed[slot] + 1)


def test_what_another_has_read_since_is_not_read_again():
    engine = Engine(NeuralSSM)
    for slot in range(2):
        engine.start(slot, [*PREFIX, 9, slot])
    step = engine.step([0, 1])
    engine.ssm.catch_up(engine.step([0]))
    engine.end(0)
    num_rows = engine.num_rows
    engine.ssm.catch_up(engine.step([1]))
    assert engine.num_rows - num_rows == int(step.num_tokens[1]) - len(PREFIX)
    assert engine.is_read(1, engine.computed[1] + 1)


@pytest.mark.parametrize("seed", range(6))
def test_whoever_comes_and_goes_all_that_is_attended_to_is_there(seed):
    engine, rng = Engine(NeuralSSM), np.random.default_rng(seed)
    num_alone = num_shared = 0
    for _ in range(200):
        for slot in range(SLOTS):
            if slot in engine.texts:
                room = len(engine.blocks[slot]) * SIZE - len(engine.texts[slot])
                if room < 2 or rng.random() < 0.1:
                    engine.end(slot)
            elif rng.random() < 0.5:
                same = len(PREFIX) if rng.random() < 0.7 else 1
                tail = rng.integers(3, size=rng.integers(1, 4)).tolist()
                engine.start(slot, PREFIX[:same] + tail, int(rng.integers(4, 16)))
        slots = [slot for slot in engine.texts if rng.random() < 0.7]
        if not slots:
            continue
        step = engine.step(rng.permutation(slots).tolist())
        ends, kv = step.num_tokens, engine.ssm.kv
        num_alone += kv.num_unread(step.slots, ends)
        num_shared += num_unread(engine, step)
        if rng.random() < 0.6:
            engine.ssm.skip(step)
        elif engine.ssm.is_far_behind(step):
            engine.ssm.read_some(step)
        else:
            engine.ssm.catch_up(step)
        for slot in engine.texts:
            assert engine.is_read(slot, kv._num_read[slot])
        for slot in slots:
            engine.schedule(slot, int(rng.integers(1, 4)))
    assert num_alone - num_shared > 100
