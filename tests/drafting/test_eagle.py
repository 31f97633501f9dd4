"""An EAGLE head reads every state once, in order, however long it was not asked."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.drafting.test_ssm import draft_kv
from vllm_specinfer.drafting.eagle import EagleHead
from vllm_specinfer.drafting.ssm import NeuralSSM

MOST_KEPT = 12


class Reader:
    """A head whose passes only note which states they would read, by slot."""

    def __init__(self, monkeypatch):
        self.head = object.__new__(EagleHead)
        self.head.model = SimpleNamespace()
        self.head._width, self.head._dtype = 1, torch.float32
        self.head.device = torch.device("cpu")
        self.head._most_kept, self.head._kept, self.head._num_kept = MOST_KEPT, {}, 0
        self.head.kv = draft_kv(4, EagleHead.lookahead)
        self.read = {slot: [] for slot in range(4)}
        self.known = dict.fromkeys(range(4), 0)
        monkeypatch.setattr(NeuralSSM, "catch_up", lambda _, step: self._pass(step))

    def _pass(self, step):
        """As `NeuralSSM.catch_up`: whatever is known and not yet read, in one pass."""
        self.head.kv.keep_up(step.slots)
        slots = [s for s in step.slots.tolist() if self.known[s] > len(self.read[s])]
        counts = [self.known[s] - len(self.read[s]) for s in slots]
        states = self.head._states(np.array(slots), np.array(counts))
        for slot, part in zip(slots, states.split(counts), strict=True):
            self.read[slot] += part[:, 0].tolist()

    def step(self, counts):
        """The target ran so many more tokens per slot; states are their numbers."""
        states = []
        for slot, count in counts.items():
            states += range(self.known[slot] + 1, self.known[slot] + count + 1)
            self.known[slot] += count
        return SimpleNamespace(
            slots=np.array(list(counts)),
            states=torch.tensor(states, dtype=torch.float32)[:, None],
            state_starts=np.cumsum([0, *counts.values()]),
        )


@pytest.mark.parametrize("seed", range(5))
def test_no_state_is_lost_or_read_twice(monkeypatch, seed):
    reader = Reader(monkeypatch)
    rng = np.random.default_rng(seed)
    for _ in range(60):
        step = reader.step({slot: int(rng.integers(1, 4)) for slot in range(4)})
        if rng.random() < 0.2:
            reader.head.catch_up(step)
        else:
            reader.head.skip(step)
        waiting = sum(reader.known[s] - len(reader.read[s]) for s in range(4))
        assert waiting <= MOST_KEPT
    reader.head.catch_up(reader.step(dict.fromkeys(range(4), 1)))
    for slot, states in reader.read.items():
        assert states == list(range(1, reader.known[slot] + 1))


def test_a_head_that_sat_out_does_not_follow(monkeypatch):
    reader, slots = Reader(monkeypatch), np.array([0, 1])
    reader.head.catch_up(reader.step({0: 4, 1: 3}))
    assert reader.head.kv.follows(slots)
    reader.head.skip(reader.step({0: 1}))
    assert not reader.head.kv.follows(slots)
    assert reader.head.kv.follows(slots[1:])
    assert not reader.head.is_full(MOST_KEPT - 1) and reader.head.is_full(MOST_KEPT)
    # Too many to keep: the head reads them all.
    reader.head.skip(reader.step({0: MOST_KEPT}))
    assert reader.head.kv.follows(slots)


def test_zeros_stand_for_what_a_waiting_request_lost(monkeypatch):
    reader = Reader(monkeypatch)
    reader.head.skip(reader.step({0: 2, 1: 3}))
    # Request 1 waits while request 0 fills the memory.
    reader.head.skip(reader.step({0: MOST_KEPT}))
    reader.head.catch_up(reader.step({0: 1, 1: 2}))
    assert reader.read[0] == list(range(1, MOST_KEPT + 4))
    assert reader.read[1] == [0, 0, 0, 4, 5]


def test_what_is_kept_keeps_no_rows_of_others_and_is_counted(monkeypatch):
    reader = Reader(monkeypatch)
    monkeypatch.setattr(NeuralSSM, "start", lambda *args: None)
    step = reader.step({0: 2, 1: 5})
    reader.head.skip(step)
    for states in (s for of_slot in reader.head._kept.values() for s in of_slot):
        assert states.untyped_storage().nbytes() == states.nbytes
        assert states.data_ptr() != step.states.data_ptr()
    assert reader.head.is_full(MOST_KEPT - 6) and not reader.head.is_full(MOST_KEPT - 7)
    reader.head.start(1, None)
    assert reader.head.is_full(MOST_KEPT - 1) and not reader.head.is_full(MOST_KEPT - 2)
    reader.head.catch_up(reader.step({0: 1}))
    assert not reader.head.is_full(MOST_KEPT)
