"""Checkpoints with quantized weights, made from tiny float models without libraries.

Dimension legend: O rows and I columns of a weight (out and in features), G groups of
`GROUP` columns that share a scale.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

GROUP = 32
# Of eight 4-bit numbers in 32 bits, from the lowest bits up.
IN_ORDER = range(8)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]


def int8(weight: torch.Tensor) -> Tensors:
    """Eight bits and a scale per row of [O, I], as compressed-tensors stores them."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    whole = (weight / scale).round().to(torch.int8)
    return {"weight": whole, "weight_scale": scale}


def gptq(weight: torch.Tensor) -> Tensors:
    """Four bits of a weight [O, I], symmetric, as GPTQ stores them."""
    whole, scale = _four_bits(weight)
    return {
        "qweight": _packed((whole + 8).T, IN_ORDER, dim=0),
        # One less than the zero point.
        "qzeros": _packed(torch.full_like(scale.T, 7), IN_ORDER, dim=1),
        "scales": scale.T.half().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def awq(weight: torch.Tensor) -> Tensors:
    """Four bits of a weight [O, I] with zero points, as AWQ stores them."""
    whole, scale = _four_bits(weight)
    return {
        "qweight": _packed((whole + 8).T, AWQ_ORDER, dim=1),
        "qzeros": _packed(torch.full_like(scale.T, 8), AWQ_ORDER, dim=1),
        "scales": scale.T.half().contiguous(),
    }


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers [O, I] from -8 to 7 and their scales [O, G]."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2) / 7
    return (groups / scale[..., None]).round().flatten(1), scale


def _packed(numbers: torch.Tensor, order: range | tuple, dim: int) -> torch.Tensor:
    """Eight numbers from 0 to 15 along a dimension in each int32."""
    eights = numbers.long().unflatten(dim, (-1, 8))
    packed = sum(eights.select(dim + 1, k) << 4 * i for i, k in enumerate(order))
    return packed.to(torch.uint32).view(torch.int32).contiguous()


_EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
FORMATS: dict[str, tuple[Callable, dict]] = {
    "int8": (
        int8,
        {
            **{"quant_method": "compressed-tensors", "format": "int-quantized"},
            **{"quantization_status": "compressed", "ignore": ["lm_head"]},
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**_EIGHT_BITS, "strategy": "channel"},
                    # Of each token, when it comes.
                    "input_activations": {
                        **_EIGHT_BITS,
                        "strategy": "token",
                        "dynamic": True,
                    },
                }
            },
        },
    ),
    "gptq": (
        gptq,
        {
            **{"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
            **{"desc_act": False, "lm_head": False},
        },
    ),
    "awq": (
        awq,
        {
            **{"quant_method": "awq", "bits": 4, "group_size": GROUP},
            **{"zero_point": True, "version": "gemm"},
        },
    ),
}


def quantized_copy(model: str, folder: Path, name: str) -> str:
    """A copy of a Llama with quantized weights.

    Args:
        model: Its folder.
        folder: Where to write the copy.
        name: One of `FORMATS`.

    Returns:
        The folder of the copy.
    """
    quantize, config = FORMATS[name]
    llama = LlamaForCausalLM.from_pretrained(model)
    tensors = llama.state_dict()
    for path, module in llama.model.layers.named_modules(prefix="model.layers"):
        if isinstance(module, torch.nn.Linear):
            weight = tensors.pop(f"{path}.weight")
            tensors |= {f"{path}.{part}": t for part, t in quantize(weight).items()}
    return _write(llama, tensors, config, folder)


def fp8_cache_copy(model: str, folder: Path, scale: float) -> str:
    """A copy of a Llama that asks for an fp8 KV cache, as llm-compressor writes it.

    Args:
        model: Its folder.
        folder: Where to write the copy.
        scale: What K and V are divided by in the cache.

    Returns:
        The folder of the copy.
    """
    llama = LlamaForCausalLM.from_pretrained(model)
    tensors = llama.state_dict()
    for i in range(llama.config.num_hidden_layers):
        for part in ("k_scale", "v_scale"):
            name = f"model.layers.{i}.self_attn.{part}"
            tensors[name] = torch.full((1,), scale)
    scheme = {
        **{"num_bits": 8, "type": "float", "strategy": "tensor"},
        **{"symmetric": True, "dynamic": False},
    }
    config = {
        **{"quant_method": "compressed-tensors", "format": "naive-quantized"},
        **{"quantization_status": "compressed", "ignore": ["lm_head"]},
        **{"config_groups": {}, "kv_cache_scheme": scheme},
    }
    return _write(llama, tensors, config, folder)


def _write(
    llama: LlamaForCausalLM, tensors: Tensors, quantization: dict, folder: Path
) -> str:
    llama.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    written = {**json.loads(file.read_text()), "quantization_config": quantization}
    file.write_text(json.dumps(written))
    return str(folder)
