"""A head's positions are those that vLLM serves it with."""

import pytest
import torch
from transformers import AutoConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_specinfer.tuning import eagle

POSITIONS = 256
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LONGROPE = {
    **{"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 4.0},
    **{"short_factor": [1.0] * 12, "long_factor": [2.0] * 12},
}


@pytest.mark.parametrize(
    ("family", "rope", "kind"),
    [
        ("llama", {"rope_type": "default"}, "default"),
        ("llama", {"rope_type": "linear", "factor": 2.0}, "linear"),
        ("llama", LLAMA3, "llama3"),
        ("qwen3", YARN, "yarn"),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, "default"),
        # These rotate some channels only.
        ("glm", {"rope_type": "default", "partial_rotary_factor": 0.5}, "default"),
        ("phi3", {**LONGROPE, "partial_rotary_factor": 0.75}, "default"),
        # Of each kind of layers another one.
        ("gemma3_text", None, "default"),
    ],
)
def test_training_and_vllm_rotate_alike(family, rope, kind):
    more = {} if rope is None else {"rope_parameters": {**rope, "rope_theta": 5e3}}
    target = AutoConfig.for_model(
        family,
        **{"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 32, "max_position_embeddings": POSITIONS, "pad_token_id": 0},
        **more,
    )
    config = eagle.head_config(target)
    assert config.rope_parameters["rope_type"] == kind
    if rope is not None:
        assert config.rope_parameters["rope_theta"] == 5e3
    attention = eagle.EagleHead(config).midlayer.self_attn
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, POSITIONS, 32), torch.randn(1, 2, POSITIONS, 32)
    positions = torch.arange(POSITIONS)
    rotation = attention._rotary(query, positions[None])
    wanted = eagle.apply_rotary_pos_emb(query, key, *rotation)
    with set_current_vllm_config(VllmConfig()):
        served = get_rope(
            config.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
        )
    rows = (x[0].transpose(0, 1).flatten(1) for x in (query, key))
    found = served.forward_native(positions, *rows)
    for ours, theirs in zip(wanted, found, strict=True):
        ours = ours[0].transpose(0, 1).flatten(1)
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
