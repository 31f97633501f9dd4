"""A new SSM: what it knows before it learns, and what is written in the end."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.e2e.models import tiny_llama
from vllm_specinfer.tuning.data import LABEL, TOP, Sample
from vllm_specinfer.tuning.model import (
    IGNORED,
    Windows,
    collate,
    collate_for_new,
    hits,
    loss,
)
from vllm_specinfer.tuning.new_ssm import NewSSM

VOCAB = 1024


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "model"
    return tiny_llama(folder, seed=0, vocab_size=VOCAB, hidden_size=320)


def new_ssm(target, hidden=224):
    theirs = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(0)
    return NewSSM(theirs.get_input_embeddings().weight.detach(), target, hidden, 2)


# 320 has more heads that copy.
@pytest.mark.parametrize("hidden", [160, 224, 320])
def test_a_text_that_repeats_itself_is_copied(target, hidden):
    ssm = new_ssm(target, hidden)
    halves = [torch.randperm(VOCAB)[:40].tolist() for _ in range(8)]
    # The answer is the prompt again; its first two tokens are not to be foreseen.
    samples = [Sample([*half, *half[:2]], half[2:]) for half in halves]
    found = hits(ssm, samples, torch.arange(VOCAB), 8)
    # Chance is 1 in 1024.
    assert sum(hit.mean() for hit in found) / len(found) > 0.8


def test_the_model_that_is_written_computes_the_same(target):
    ssm = new_ssm(target)
    ids = torch.randint(VOCAB, (2, 12))
    with torch.inference_mode():
        for parameter in ssm.parameters():
            parameter += 0.01 * torch.randn(parameter.shape)
        wanted = ssm.hidden(ids) @ ssm.rows(torch.arange(VOCAB)).T
        found = ssm.finished()(ids).logits
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_half_of_the_loss_is_to_the_targets_likeliest_tokens(target):
    ssm = new_ssm(target)
    tokens = torch.randint(VOCAB, (3, TOP)).numpy()
    chances = torch.rand(3, TOP).numpy() / TOP
    label = np.zeros(3, LABEL)
    label["token"], label["probability"] = tokens, chances
    answer = tokens[:, 0].tolist()
    # Tokens that the reduced head has not count neither as wanted nor as likely.
    draft_vocab = torch.arange(0, VOCAB, 2)
    sample = Sample([1, 2], answer, label)
    data = Windows([sample, Sample([5], [4], label[:1])], [np.zeros(1, bool)] * 2, 3)
    found = loss(ssm, collate([data[0]]), draft_vocab)
    with torch.inference_mode():
        hidden = ssm.hidden(torch.tensor([[1, 2, *answer]]))[0]
        logprobs = (hidden @ ssm.rows(draft_vocab).T).log_softmax(-1)
    losses = []
    for place in range(3):
        if answer[place] % 2:
            continue
        drafted = [k for k in range(TOP) if tokens[place, k] % 2 == 0]
        given = label["probability"][place, drafted].astype(np.float32)
        at = logprobs[1 + place]
        soft = sum(
            float(chance) * at[tokens[place, k] // 2]
            for chance, k in zip(given / given.sum(), drafted, strict=True)
        )
        losses.append(-(at[answer[place] // 2] + soft) / 2)
    assert 0 < len(losses) < 3
    torch.testing.assert_close(found, sum(losses) / len(losses), rtol=0.02, atol=0.02)


def test_texts_that_repeat_themselves_are_learned_from_the_second_time_on():
    rows = [(list(range(9)), [IGNORED] * 4 + list(range(4, 9)), None)] * 3
    torch.manual_seed(0)
    batches = [collate_for_new(rows) for _ in range(200)]
    copies = [b for b in batches if b["input_ids"].tolist() != [r[0] for r in rows]]
    assert 10 < len(copies) < 60
    periods = set()
    for batch in copies:
        learned = (batch["labels"][0] != IGNORED).nonzero().flatten()
        period = int(learned[0]) - 1
        periods.add(period)
        ids = batch["input_ids"]
        assert (ids[:, period:] == ids[:, : 9 - period]).all()
        assert (batch["labels"][:, learned] == ids[:, learned]).all()
        assert len(learned) == 9 - 1 - period
    assert periods == {2, 3, 4}
