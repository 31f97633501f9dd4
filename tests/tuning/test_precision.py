"""What trains on CPUs that are slow at bfloat16, and on all others."""

import pytest
import torch
import vllm
from transformers import LlamaForCausalLM

from tests.conftest import tiny_llama as llama_config
from tests.e2e.models import VOCAB, tiny_llama
from vllm_specinfer.tuning import data, eagle
from vllm_specinfer.tuning.data import Sample
from vllm_specinfer.tuning.settings import PoolSettings


class StartedError(Exception):
    """Carries an engine's arguments."""


@pytest.fixture(params=[True, False], ids=["fast", "slow"])
def fast(request, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: request.param)
    return request.param


@pytest.mark.parametrize("quantized", [True, False])
def test_an_engine_writes_in_float32_where_bfloat16_is_slow(
    fast, quantized, monkeypatch, tmp_path
):
    def start(model, **arguments):
        raise StartedError(arguments)

    def dtype(**settings):
        settings = PoolSettings(target, "prompts", **settings)
        with pytest.raises(StartedError) as started:
            data.generate(tmp_path, settings, [[1, 2]])
        return started.value.args[0]["dtype"]

    monkeypatch.setattr(vllm, "LLM", start)
    more = {"quantization_config": {"quant_method": "fp8"}} if quantized else {}
    target = llama_config(tmp_path, **more)
    assert dtype() == ("auto" if fast or quantized else "float32")
    assert dtype(engine={"dtype": "half"}) == "half"


def test_a_head_learns_in_either_precision(fast, tmp_path):
    target = LlamaForCausalLM.from_pretrained(tiny_llama(tmp_path / "target", seed=0))
    torch.manual_seed(0)
    head = eagle.EagleHead(eagle.head_config(target.config))
    products = []
    head.fc.register_forward_hook(lambda _, x, y: products.append(y.dtype))
    width = target.config.hidden_size * (
        1 + len(head.config.eagle_aux_hidden_state_layer_ids)
    )
    rows = [(Sample([5, 6], [7, 8, 9]), torch.randn(5, width).bfloat16())]
    teacher = eagle.Teacher(target, torch.arange(VOCAB))
    loss = eagle.loss(head, eagle.collate(rows), teacher, 2)
    loss.backward()
    assert head.fc.weight.grad.abs().sum() > 0
    assert len(eagle.hits(head, teacher, rows, 1, 2)) == 2
    assert products == 2 * [torch.bfloat16 if fast else torch.float32]
