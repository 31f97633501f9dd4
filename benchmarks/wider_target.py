"""A larger target that writes the same texts: every layer four times as wide.

    python benchmarks/wider_target.py OUT [--source FOLDER]

What is new is zeros: hidden state, heads and inner layers have four times as many
elements, of which the first quarter computes what it did and the others add nothing.
The root mean square of a hidden state halves by that, so the norms' weights are halved
and their epsilon is quartered, which is exact. Only sums of more elements may round
differently.

SmolLM2-135M becomes a model of 1.8 billion parameters, whose steps cost what such a
model's cost and whose texts SSMs foresee as they do SmolLM2-135M's.
"""

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from vllm_specinfer import assets
from vllm_specinfer.results import write_json

TIMES = 4  # a power of four, so that norms stay exact
WEIGHTS = "model.safetensors"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)


def widen(source: Path, out: Path) -> None:
    """Write the wider model.

    Args:
        source: A Llama without biases, its weights in one file.
        out: Folder that is not there yet.

    Raises:
        ValueError: The source is another kind of model.
        FileExistsError: There is such a folder.
    """
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / WEIGHTS)
    has_biases = any(name.endswith(".bias") for name in weights)
    if config["model_type"] != "llama" or has_biases:
        raise ValueError(f"{source} must be a Llama without biases")
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, weight in weights.items():
        *outputs, inputs = [size * (TIMES - 1) for size in weight.shape]
        if not outputs:
            weights[name] = pad(weight / TIMES**0.5, (0, inputs))
        elif "embed_tokens" in name or "lm_head" in name:  # [vocabulary, hidden state]
            weights[name] = pad(weight, (0, inputs))
        else:
            weights[name] = pad(weight, (0, inputs, 0, *outputs))
    save_file(weights, out / WEIGHTS, {"format": "pt"})
    config |= {size: config[size] * TIMES for size in SIZES}
    config["rms_norm_eps"] /= TIMES
    write_json(out / "config.json", config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, help="default: SmolLM2-135M-Instruct")
    args = parser.parse_args()
    widen(args.source or assets.smollm2(), args.out)
