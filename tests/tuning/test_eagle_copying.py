"""A head copies from its context before it has learned anything."""

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.e2e.models import VOCAB, tiny_llama
from vllm_specinfer.tuning import eagle
from vllm_specinfer.tuning.data import Sample
from vllm_specinfer.tuning.eagle_copying import write_copy_heads
from vllm_specinfer.tuning.states import write_states


def test_a_batch_of_texts_too_short_to_unroll_has_no_loss():
    assert eagle._cross_entropy(*torch.zeros(2, 0, VOCAB)) == 0


@pytest.mark.parametrize("beside", [0, 9])
def test_texts_too_short_to_unroll_count_as_far_as_they_go(tmp_path, beside):
    folder = tiny_llama(tmp_path / "target", seed=0)
    target = LlamaForCausalLM.from_pretrained(folder)
    sizes = [(1, 1), (1, 2), (2, 1), *[(beside, 5)] * (beside > 0)]
    samples = [Sample([3] * prompt, [4] * answer) for prompt, answer in sizes]
    head = eagle.EagleHead(eagle.head_config(target.config))
    layers = head.config.eagle_aux_hidden_state_layer_ids
    states = write_states(tmp_path / "s", target.base_model, layers, samples)
    rows = [states[i] for i in range(len(samples))]
    teacher = eagle.Teacher(target, torch.arange(VOCAB))
    # All together, one by one, and the shortest alone.
    found = eagle.hits(head, teacher, rows, 8, 3)
    assert found == eagle.hits(head, teacher, rows, 1, 3)
    assert len(eagle.hits(head, teacher, rows[:1], 8, 3)) == 3
    for batch in rows[:1], rows:
        assert eagle.loss(head, eagle.collate(batch), teacher, 3) > 0


def test_a_text_that_repeats_itself_is_copied(tmp_path):
    folder = tiny_llama(tmp_path / "target", seed=0, scale=3, tie_word_embeddings=True)
    target = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    halves = [torch.randperm(VOCAB)[:40].tolist() for _ in range(32)]
    # The answer is the prompt again.
    samples = [Sample(half, half) for half in halves]
    head = eagle.EagleHead(eagle.head_config(target.config))
    eagle.start_from_last_layer(head, target)
    layers = head.config.eagle_aux_hidden_state_layer_ids
    states = write_states(tmp_path / "s", target.base_model, layers, samples)
    teacher = eagle.Teacher(target, torch.arange(VOCAB))
    held_out = states.part(24, None)
    (before,) = eagle.hits(head, teacher, held_out, 8, 1)
    write_copy_heads(head, target, [states[i] for i in range(24)])
    (after,) = eagle.hits(head, teacher, held_out, 8, 1)
    # Chance is 1 in 40.
    assert before < 0.1 and after > 0.25
