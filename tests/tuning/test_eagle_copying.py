"""A head copies from its context before it has learned anything."""

import torch
from transformers import LlamaForCausalLM

from tests.e2e.models import VOCAB, tiny_llama
from vllm_specinfer.tuning import eagle
from vllm_specinfer.tuning.data import Sample
from vllm_specinfer.tuning.eagle_copying import write_copy_heads
from vllm_specinfer.tuning.states import write_states


def test_a_batch_of_texts_too_short_to_unroll_has_no_loss():
    assert eagle._cross_entropy(*torch.zeros(2, 0, VOCAB)) == 0


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
