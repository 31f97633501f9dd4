"""Rows of logits get the adapter of their request."""

import numpy as np
import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState

from vllm_specinfer.lora import TreeLoraState

HIDDEN, VOCAB, RANK = 6, 5, 2


def lora_logits(state: LoraState, hidden: torch.Tensor) -> torch.Tensor:
    """What the adapters add to the logits of three requests with 3, 1 and 2 rows."""
    for slot, lora in enumerate((2, None, 1)):
        adapter = lora and LoRARequest(f"lora{lora}", lora, "folder")
        state.add_request(f"r{slot}", slot, adapter)
    of_logits, of_tokens, adapters = state.make_lora_inputs(
        ["r0", "r1", "r2"], np.arange(3), np.array([3, 1, 2])
    )
    assert {a.lora_int_id for a in adapters} == {1, 2}
    wrapper = PunicaWrapperCPU(64, 8, "cpu")
    mapping = LoRAMapping(of_tokens, of_logits, is_prefill=True)
    wrapper.update_metadata(mapping, [1, 2, None], 3, VOCAB)
    generator = torch.Generator().manual_seed(0)
    a, b = torch.zeros(3, 1, RANK, HIDDEN), torch.zeros(3, 1, VOCAB, RANK)
    # The last place is empty: requests without an adapter use it.
    a[:2].normal_(generator=generator)
    b[:2].normal_(generator=generator)
    logits = torch.zeros(len(hidden), VOCAB)
    wrapper.add_lora_logits(logits, hidden, a, b, 1.0)
    places = [1, 1, 1, 2, 0, 0]
    expected = [b[p, 0] @ (a[p, 0] @ h) for p, h in zip(places, hidden, strict=True)]
    torch.testing.assert_close(logits, torch.stack(expected))
    return logits


def test_every_node_of_a_tree_gets_the_adapter_of_its_request():
    hidden = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    logits = lora_logits(TreeLoraState(8, lambda: np.array([3, 1, 2])), hidden)
    assert logits[:3].any() and not logits[3].any() and logits[4:].any()


def test_vllm_itself_has_one_row_of_logits_per_request():
    hidden = torch.randn(6, HIDDEN)
    with pytest.raises(RuntimeError):
        lora_logits(LoraState(8), hidden)
