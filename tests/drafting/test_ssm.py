"""What an SSM takes for read is in its K/V, whoever wrote it and heard of it when.

Its passes are played: each row notes the text that it belongs to in the slot it writes.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_specinfer.drafting.draft_kv import DraftKV
from vllm_specinfer.drafting.graphs import PassRows
from vllm_specinfer.drafting.ssm import NeuralSSM

SLOTS, SIZE, MOST_BLOCKS, WINDOW = 2, 2, 40, 5
MOST_ROWS = 7
MAX_LEN = SIZE * MOST_BLOCKS
VOCAB = 3


def draft_kv(num_slots, lookahead):
    """Where no request owns a block."""
    gpu = torch.zeros(num_slots, MOST_BLOCKS, dtype=torch.int32)
    tables = SimpleNamespace(
        block_tables=[SimpleNamespace(gpu=gpu)],
        num_blocks=SimpleNamespace(np=np.zeros((1, num_slots), np.int32)),
        block_sizes=[SIZE],
    )
    return DraftKV(tables, 0, num_slots * MOST_BLOCKS, MAX_LEN, lookahead)


class Engine:
    """Requests with texts of few tokens, so that they often begin alike.

    A block keeps its K/V when its request is gone, and the next one in the slot may get
    it as cached.
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        ssm = self.ssm = NeuralSSM.__new__(NeuralSSM)
        ssm.device, ssm.max_model_len = torch.device("cpu"), MAX_LEN
        ssm.kv = draft_kv(SLOTS, ssm.lookahead)
        ssm._run_rows, ssm._last = self._run_rows, lambda *_: None
        ssm.rows_per_step = MOST_ROWS
        # By KV slot: the text whose last token's K/V is there.
        self.memory = np.full(SLOTS * MAX_LEN, None, object)
        self.texts = [[] for _ in range(SLOTS)]
        self.unheard, self.mode = [], "read"
        # Steps that were followed, steps of which only some was read, and cached rows
        # that the SSM knew.
        self.num_followed = self.num_partly = self.num_cached = 0

    def _run_rows(self, rows, states):
        self.num_rows = len(rows.tokens)
        owners = np.repeat(rows.slots, np.diff(rows.starts))
        for slot, position, kv_slot, token in zip(
            owners, rows.positions, rows.kv_slots, rows.tokens, strict=True
        ):
            text = tuple(self.texts[slot][: position + 1])
            assert text[-1] == token
            self.memory[kv_slot] = text

    def kv_slot(self, slot, position):
        block = self.ssm.kv.blocks.table[slot, position // SIZE]
        return block * SIZE + position % SIZE

    def tokens(self):
        found = np.zeros((SLOTS, MAX_LEN), np.int32)
        for slot, text in enumerate(self.texts):
            found[slot, : len(text)] = text
        return found

    def next_tokens(self, position, count):
        """Nearly always those of all texts at this position."""
        usual = [(position + i) % VOCAB for i in range(count)]
        if self.rng.random() < 0.95:
            return usual
        return self.rng.integers(VOCAB, size=count).tolist()

    def start(self, slot):
        """Another request; blocks that hold the target's K/V of its text are kept."""
        old = self.texts[slot]
        same = int(self.rng.integers(len(old) + 1))
        new = old[: min(same, MAX_LEN // 2 - 1)]
        new += self.next_tokens(len(new), int(self.rng.integers(1, 30)))
        cached = min(same, len(new) - 1, len(old)) // SIZE * SIZE
        blocks = self.ssm.kv.blocks.table[slot].tolist()[: cached // SIZE]
        own = range(slot * MOST_BLOCKS, (slot + 1) * MOST_BLOCKS)
        free = [block for block in own if block not in blocks]
        blocks += (
            free if self.rng.random() < 0.7 else self.rng.permutation(free).tolist()
        )
        first, later = blocks[: cached // SIZE + 1], blocks[cached // SIZE + 1 :]
        counts = self.ssm.kv.blocks._counts
        counts[slot] = len(first)
        self.texts[slot] = new
        self.unheard = [(s, *rest) for s, *rest in self.unheard if s != slot]
        request = SimpleNamespace(
            block_ids=[first], num_computed_tokens=cached, prefill_token_ids=new
        )
        self.ssm.start(slot, request)
        self.ssm.kv.append(slot, [later])
        counts[slot] = len(blocks)
        self.num_cached += self.ssm.kv._num_read[slot]

    def step(self, most):
        """Tokens come; the SSM follows them where it may, reads or sits out."""
        slots = self.rng.permutation(SLOTS)[: self.rng.integers(1, SLOTS + 1)]
        before = [len(self.texts[slot]) for slot in slots]
        for slot in slots:
            if len(self.texts[slot]) + WINDOW >= MAX_LEN:
                self.start(slot)
                return
        for slot in slots:
            count = int(self.rng.integers(1, most + 1))
            self.texts[slot] += self.next_tokens(len(self.texts[slot]), count)
        lengths = np.array([len(self.texts[slot]) for slot in slots])
        if self.rng.random() < 0.15:
            self.mode = self.rng.choice(["follow", "sit out", "read"])
        if self.mode == "sit out":
            self.ssm.kv.fall_behind(slots)
        elif self.mode == "follow" and self.ssm.kv.follows(slots):
            self.follow(slots, before)
        else:
            self.hear(0)
            step = SimpleNamespace(
                slots=slots,
                growing=np.arange(len(slots)),
                num_tokens=lengths,
                all_token_ids=self.tokens(),
            )
            unread = self.ssm.kv.num_unread(slots, lengths)
            if self.ssm.is_far_behind(step):
                self.num_partly += 1
                self.ssm.read_some(step)
                self.ssm.skip(step)
                assert self.num_rows == MOST_ROWS < unread
                left = self.ssm.kv.num_unread(slots, lengths)
                assert left == unread - MOST_ROWS
            else:
                self.ssm.catch_up(step)
                assert self.num_rows <= 2 * MOST_ROWS + len(slots)

    def follow(self, slots, before):
        """What the device does: the last step's tokens, then scratch behind them."""
        self.num_followed += 1
        for slot, first in zip(slots.tolist(), before, strict=True):
            text = self.texts[slot]
            for position in range(first, len(text)):
                kv_slot = self.kv_slot(slot, position)
                self.memory[kv_slot] = tuple(text[: position + 1])
            for position in range(len(text), min(len(text) + 6, MAX_LEN)):
                self.memory[self.kv_slot(slot, position)] = "scratch"
            assert self.is_read(slot, len(text))
            self.unheard.append((slot, len(text)))

    def hear(self, left):
        """The host hears of all follows but so many."""
        while len(self.unheard) > left:
            slot, length = self.unheard.pop(0)
            self.ssm.kv.has_read(slot, length, self.tokens()[slot])

    def is_read(self, slot, num_rows):
        text = self.texts[slot]
        return all(
            self.memory[self.kv_slot(slot, r)] == tuple(text[: r + 1])
            for r in range(num_rows)
        )


@pytest.mark.parametrize("seed", range(8))
def test_what_counts_as_read_is_there(seed):
    engine = Engine(seed)
    for slot in range(SLOTS):
        engine.start(slot)
    for _ in range(400):
        if engine.rng.random() < 0.1:
            engine.start(int(engine.rng.integers(SLOTS)))
        engine.step(WINDOW)
        engine.hear(2)
        for slot in range(SLOTS):
            num_read = engine.ssm.kv._num_read[slot]
            assert num_read <= len(engine.texts[slot])
            assert engine.is_read(slot, num_read)
    assert engine.num_followed > 20 and engine.num_partly > 10
    assert engine.num_cached > 0


def read_all(engine, text):
    """The SSM catches up with the text of slot 0."""
    engine.texts[0] = text
    engine.ssm.catch_up(
        SimpleNamespace(
            slots=np.array([0]),
            growing=np.array([0]),
            num_tokens=np.array([len(text)]),
            all_token_ids=engine.tokens(),
        )
    )


def test_a_block_whose_last_token_is_run_again_stays_known():
    engine = Engine(0)
    engine.start(0)
    text = [1, 2, 0, 1] * 2
    read_all(engine, text)
    read_all(engine, text)
    blocks = engine.ssm.kv.blocks.table[0].tolist()
    assert engine.ssm.kv._written.start(1, blocks, text) == len(text)


def test_what_a_block_held_before_is_forgotten_when_a_request_gets_it():
    engine = Engine(0)
    engine.start(0)
    text = [1, 2, 0, 1, 2, 0]
    read_all(engine, text)
    blocks = engine.ssm.kv.blocks.table[0].tolist()
    engine.ssm.kv.append(1, [blocks[1:2]])
    assert engine.ssm.kv._written.start(1, blocks, text) == SIZE


def test_what_a_block_held_before_is_forgotten_where_scratch_may_be():
    engine = Engine(0)
    engine.start(0)
    text = [1, 2, 0, 1, 2, 0, 1, 2]
    read_all(engine, text)
    # Another request gets the same blocks, and the first token of another one's text
    # behind its own.
    blocks = engine.ssm.kv.blocks.table[0].tolist()
    request = SimpleNamespace(
        block_ids=[blocks], num_computed_tokens=0, prefill_token_ids=text[:6]
    )
    engine.ssm.start(0, request)
    read_all(engine, text[:6])
    engine.texts[0] = text[:7]
    engine.follow(np.array([0]), [6])
    assert engine.ssm.kv._written.start(1, blocks, text) == 6


@pytest.mark.parametrize(("lookahead", "unread"), [(0, 7 + 2), (1, 6 + 1)])
def test_what_an_ssm_has_not_read(lookahead, unread):
    kv = draft_kv(4, lookahead)
    kv._num_read[:] = [3, 9, 5, 8]
    assert kv.num_unread(np.array([0, 3, 2]), np.array([10, 8, 7])) == unread


@pytest.mark.parametrize("sees_images", [True, False])
def test_placeholders_beyond_the_vocabulary_are_read_as_its_last_token(
    monkeypatch, sees_images
):
    module = "vllm_specinfer.drafting.ssm"
    monkeypatch.setattr(f"{module}.DraftHead", lambda *_: None)
    monkeypatch.setattr(f"{module}.set_forward_context", lambda *_, **__: nullcontext())
    target = SimpleNamespace(is_multimodal_model=sees_images)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=9, get_vocab_size=lambda: 100),
        speculative_config=SimpleNamespace(target_model_config=target),
        scheduler_config=None,
    )
    ssm = NeuralSSM(
        lambda input_ids, positions: input_ids, config, set(), torch.device("cpu")
    )
    (read,) = ssm._run(torch.tensor([5, 99, 100, 4000]), None, None, None, None)
    assert read.tolist() == ([5, 99, 99, 99] if sees_images else [5, 99, 100, 4000])


def test_models_that_can_see_read_embeddings_of_ids(monkeypatch):
    read = {}

    class Seeing:
        supports_multimodal_embeddings = True

        def embed_input_ids(self, input_ids):
            return -input_ids

        def __call__(self, **inputs):
            return read.update(inputs) or inputs["input_ids"]

    monkeypatch.setattr("vllm_specinfer.drafting.ssm.DraftHead", lambda *_: None)
    target = SimpleNamespace(is_multimodal_model=False)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=9),
        speculative_config=SimpleNamespace(target_model_config=target),
        scheduler_config=None,
    )
    ssm = NeuralSSM(Seeing(), config, set(), torch.device("cpu"))
    ssm._forward(torch.tensor([5, 7]), torch.tensor([0, 1]), None)
    assert read["inputs_embeds"].tolist() == [-5, -7]
    assert read["positions"].tolist() == [0, 1]


def test_no_pass_has_more_rows_than_the_model_was_compiled_for():
    """vLLM compiles for at most max_num_batched_tokens (piecewise_backend.py)."""
    ssm = NeuralSSM.__new__(NeuralSSM)
    ssm._scheduler_config = SimpleNamespace(max_num_batched_tokens=4)
    ssm.num_rows = 0
    found = torch.zeros(4, 1), torch.zeros(4, 1)

    def run_piece(rows, states):
        """As a graph, into the same tensors each time."""
        count = len(rows.tokens)
        assert count <= 4
        found[0][:count, 0] = torch.from_numpy(rows.tokens)
        found[1][:count].copy_(states)
        return tuple(output[:count] for output in found)

    ssm._run_piece = run_piece
    ssm._taken = lambda outputs: torch.cat(outputs, dim=1)
    rows = PassRows.chains(
        slots=np.arange(2),
        starts=np.array([0, 3, 10], np.int32),
        seq_lens=np.array([3, 7], np.int32),
        tokens=np.arange(10, dtype=np.int32),
        positions=np.arange(10),
        kv_slots=np.arange(10),
    )
    states = 100 + torch.arange(10.0)[:, None]
    hidden = ssm._run_rows(rows, states)
    assert hidden.tolist() == [[i, 100 + i] for i in range(10)]
    assert ssm.num_rows == 10
