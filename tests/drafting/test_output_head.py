"""The SSM's head over its own or a reduced vocabulary."""

import json
from types import SimpleNamespace

import pytest
import torch

from vllm_specinfer.draft_vocab import DRAFT_VOCAB_FILE
from vllm_specinfer.drafting import output_head
from vllm_specinfer.drafting.output_head import DraftHead

VOCAB, HIDDEN = 100, 16


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    group = SimpleNamespace(world_size=1, broadcast=lambda tensor: tensor)
    monkeypatch.setattr(output_head, "get_tp_group", lambda: group)


def make(tmp_path, content=None, packed=None, **processor):
    torch.manual_seed(0)
    # Whole eighths, so that bfloat16 holds them and their products exactly.
    weight = torch.randint(-8, 9, (VOCAB, HIDDEN)) / 8
    if content is not None:
        (tmp_path / DRAFT_VOCAB_FILE).write_text(json.dumps(content))
    model = torch.nn.Module()
    parameter = torch.nn.Parameter(weight) if packed is None else packed
    model.lm_head = SimpleNamespace(weight=parameter, embedding_dim=HIDDEN)
    scale = {"soft_cap": None, "scale": 1.0, **processor}
    model.logits_processor = SimpleNamespace(**scale)
    model.compute_logits = lambda hidden: hidden @ weight.T
    config = SimpleNamespace(
        model=str(tmp_path), revision=None, get_vocab_size=lambda: VOCAB
    )
    return DraftHead(model, config), weight


@pytest.mark.parametrize("shape", [(7, 3 * HIDDEN), (0,), (VOCAB, 8)])
def test_a_head_that_is_packed_for_a_kernel_is_not_cut(tmp_path, caplog, shape):
    """Some quantized models pack theirs while they are loaded."""
    packed = torch.nn.Parameter(torch.zeros(shape))
    head, _ = make(tmp_path, {"tokens": [3]}, packed)
    assert "is not used: its head is quantised" in caplog.text
    assert head.likeliest(torch.zeros(1, HIDDEN), 4)[1].shape == (1, 4)


def best(logits, tokens, k):
    kept = logits[:, tokens]
    values, places = kept.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    return values[:, :k], tokens[places[:, :k]]


@pytest.mark.parametrize("tokens", [None, [3], [90, 4, 17, 55, 2, 61]])
def test_children_are_the_likeliest_of_the_vocabulary(tmp_path, tokens):
    content = None if tokens is None else {"tokens": tokens}
    head, weight = make(tmp_path, content)
    hidden = torch.randint(-8, 9, (5, HIDDEN)) / 8
    values, children = head.likeliest(hidden, 3)
    among = torch.arange(VOCAB) if tokens is None else torch.tensor(sorted(tokens))
    wanted_values, wanted = best(hidden @ weight.T, among, 3)
    torch.testing.assert_close(values, wanted_values, atol=2e-2, rtol=0)
    chosen = (hidden @ weight.T).gather(1, children)
    torch.testing.assert_close(chosen, (hidden @ weight.T).gather(1, wanted))
    assert set(children.flatten().tolist()) <= set(among.tolist())
    # vLLM keeps what buffers hold while it sleeps, and nothing else.
    assert len(dict(head._model.named_buffers())) == (0 if tokens is None else 2)


@pytest.mark.parametrize("content", [None, {"tokens": list(range(40, 90))}])
def test_all_ranks_draft_what_the_first_one_does(tmp_path, monkeypatch, content):
    """Where each multiplies all rows by hidden states that may be rounded apart."""
    head, _ = make(tmp_path, content)
    hidden, sent = torch.randint(-8, 9, (5, HIDDEN)) / 8, []
    first = head.likeliest(hidden, 3)
    group = SimpleNamespace(
        world_size=2,
        device_communicator=None,
        broadcast=lambda mine: sent.append(mine.clone()) or sent[0],
    )
    monkeypatch.setattr(output_head, "get_tp_group", lambda: group)
    of_ranks = [head.likeliest(rows, 3) for rows in (hidden, -hidden)]
    same = [
        values.dtype == torch.float32
        and torch.equal(values, first[0])
        and torch.equal(tokens, first[1])
        for values, tokens in of_ranks
    ]
    assert same == [True, content is not None]  # vLLM gathers all logits
    assert len(sent) == (0 if content is None else 2)  # one of each rank


@pytest.mark.parametrize(
    ("communicator", "sender"),
    [
        (SimpleNamespace(disabled=False), "vllm"),
        (SimpleNamespace(disabled=True), "torch"),
        (None, "torch"),
    ],
)
def test_vllms_own_binding_of_nccl_sends_where_there_is_one(
    tmp_path, monkeypatch, communicator, sender
):
    head, _ = make(tmp_path, {"tokens": [3, 7]})
    sent = []

    def by_vllm(tensor, src):
        assert src == 0 and tensor.is_contiguous() and tensor.dtype == torch.float64
        sent.append("vllm")
        tensor[1] = 55  # in place, as NCCL does

    def by_torch(tensor):
        sent.append("torch")
        tensor[1] = 55
        return tensor

    # That of a CPU has none.
    device_communicator = SimpleNamespace()
    if communicator is not None:
        communicator.broadcast = by_vllm
        device_communicator.pynccl_comm = communicator
    group = SimpleNamespace(
        world_size=2, device_communicator=device_communicator, broadcast=by_torch
    )
    monkeypatch.setattr(output_head, "get_tp_group", lambda: group)
    _, tokens = head.likeliest(torch.zeros(1, HIDDEN), 2)
    assert tokens.tolist() == [[55, 55]] and sent == [sender]


def test_what_is_sent_holds_any_token(tmp_path, monkeypatch):
    head, _ = make(tmp_path, {"tokens": [3, 7]})
    head._tokens.copy_(torch.tensor([2**24 + 1, 2**31 - 1]))
    group = SimpleNamespace(
        world_size=2, device_communicator=None, broadcast=lambda tensor: tensor
    )
    monkeypatch.setattr(output_head, "get_tp_group", lambda: group)
    _, tokens = head.likeliest(torch.zeros(1, HIDDEN), 2)
    assert tokens.tolist() == [[2**24 + 1, 2**31 - 1]]


def test_rows_of_another_heads_weights_are_copied_again(tmp_path):
    """Where graphs that were captured read them; on a CPU as the kernels take them."""
    tokens = [3, 4, 17, 55, 90]
    head, weight = make(tmp_path, {"tokens": tokens})
    place, hidden = head._rows.data_ptr(), torch.randint(-8, 9, (5, HIDDEN)) / 8
    new = weight.flip(0)
    head._model.lm_head.weight = torch.nn.Parameter(new)
    head.copy_again()
    values, _ = best(hidden @ new.T, torch.tensor(tokens), 3)
    torch.testing.assert_close(head.likeliest(hidden, 3)[0], values, atol=2e-2, rtol=0)
    assert head._rows.data_ptr() == place


def test_whole_heads_have_no_rows_to_copy_again(tmp_path):
    head, _ = make(tmp_path)
    hidden = torch.randint(-8, 9, (5, HIDDEN)) / 8
    before = head.likeliest(hidden, 3)
    head.copy_again()
    assert torch.equal(before[0], head.likeliest(hidden, 3)[0])


@pytest.mark.parametrize("num_rows", [0, 1, 4, 6])
def test_rows_come_to_the_head_a_few_at_a_time(tmp_path, monkeypatch, num_rows):
    head, _ = make(tmp_path)
    hidden = torch.randint(-8, 9, (num_rows, HIDDEN)) / 8
    values, children = head.likeliest(hidden, 3)
    whole, seen = head._model.compute_logits, []
    head._model.compute_logits = lambda rows: seen.append(len(rows)) or whole(rows)
    monkeypatch.setattr(output_head, "MOST_ROWS", 4)
    found = head.likeliest(hidden, 3)
    assert torch.equal(found[0], values) and torch.equal(found[1], children)
    assert max(seen) <= 4 and sum(seen) == num_rows


@pytest.mark.parametrize(
    "content", [[1, 2], {}, {"tokens": []}, {"tokens": [1, 1]}, {"tokens": [VOCAB]}]
)
def test_a_wrong_file_is_an_error(tmp_path, content):
    with pytest.raises(ValueError, match="draft_vocab.json of the SSM"):
        make(tmp_path, content)


def test_a_head_with_more_than_rows_is_used_whole(tmp_path):
    head, weight = make(tmp_path, {"tokens": [1, 2, 3]}, soft_cap=30.0)
    hidden = torch.randint(-8, 9, (5, HIDDEN)) / 8
    _, children = head.likeliest(hidden, 1)
    chosen = (hidden @ weight.T).gather(1, children)
    torch.testing.assert_close(chosen, (hidden @ weight.T).amax(1, keepdim=True))


def test_every_rank_has_the_rows_of_all(monkeypatch):
    weight, tokens = torch.randn(VOCAB, HIDDEN), torch.tensor([3, 41, 42, 99, 7])
    group, parts = SimpleNamespace(world_size=2, cpu_group="gloo"), []
    monkeypatch.setattr(output_head, "get_tp_group", lambda: group)
    monkeypatch.setattr(
        *(torch.distributed, "all_reduce"),
        lambda rows, group: parts.append((rows, group)),
    )
    for first, end in ((0, 42), (42, VOCAB)):
        # vLLM pads a shard behind its rows.
        shard = torch.nn.functional.pad(weight[first:end], (0, 0, 0, 6), value=9)
        indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=end)
        head = SimpleNamespace(weight=shard, shard_indices=indices)
        output_head._rows_of(head, tokens)
    (first, own), (second, other) = parts
    assert (first + second).equal(weight[tokens])
    assert own == other == "gloo"
