"""A deeper SSM that begins as the one it is made from.

    python examples/deepen_ssm.py SSM OUT --layers 6

The new layers add nothing at first: their output projections are zero. `vllm-specinfer
tune --base OUT --num-ssms 1` trains it on.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import LlamaForCausalLM


@torch.no_grad()
def deepen(source: Path, out: Path, num_layers: int) -> None:
    """Copy the folder, with new layers above the old ones."""
    small = LlamaForCausalLM.from_pretrained(source)
    small.config.num_hidden_layers = num_layers
    torch.manual_seed(0)
    large = LlamaForCausalLM(small.config).to(small.dtype)
    missing, unexpected = large.load_state_dict(small.state_dict(), strict=False)
    if unexpected or any(".layers." not in name for name in missing):
        raise ValueError(f"{source} must be a shallower Llama; got {missing}")
    for layer in large.model.layers[len(small.model.layers) :]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    large.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    args = parser.parse_args()
    deepen(args.source, args.out, args.layers)
