"""A target's linear layers by rows of a step: this package's kernels over vLLM's.

    python benchmarks/linear.py [--dtype bfloat16] [--checkpoint float32]
        [--rows 1 4 9 16 32 64]

All layers of a Llama-like model one after the other, random weights, both ways in turn;
medians. One row is plain decoding at batch 1, a tree of 8 nodes has 9. Weights are what
is left of them in the checkpoint's type: float32 ones of bfloat16 take half the bytes.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

DTYPES = ["float32", "bfloat16", "float16"]


def shapes(config: object) -> list[tuple[int, int]]:
    """Outputs and inputs of the layers, the head last."""
    size, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or size // config.num_attention_heads
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = [(q + 2 * kv, size), (size, q), (2 * inner, size), (size, inner)]
    return layer * config.num_hidden_layers + [(config.vocab_size, size)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="SmolLM2-135M where it is not given")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--checkpoint", default="bfloat16", choices=DTYPES)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 2, 4, 6, 9, 12, 16, 24, 32, 64, 256]
    )
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    from transformers import AutoConfig
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import current_platform

    from vllm_specinfer import assets
    from vllm_specinfer.kernels.cpu.linear import kernel_for

    current_platform.import_kernels()
    dtype, published = (getattr(torch, name) for name in (args.dtype, args.checkpoint))
    config = AutoConfig.from_pretrained(args.target or str(assets.smollm2()))
    weights = [torch.randn(shape).to(published).to(dtype) for shape in shapes(config)]
    kernels = [kernel_for(weight) for weight in weights]
    if None in kernels:
        raise SystemExit("vLLM's own way is used for such weights on this machine")

    def vllms(weight: torch.Tensor) -> nn.Module:
        layer = nn.Linear(*weight.T.shape, bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return layer

    layers = [vllms(weight) for weight in weights]

    def seconds(inputs: dict[int, torch.Tensor], ours: bool) -> float:
        start = time.perf_counter()
        for layer, kernel in zip(layers, kernels, strict=True):
            x = inputs[layer.in_features]
            if ours:
                kernel.linear(x, kernel.weight, None)
            else:
                layer.cpu_linear(x, layer.weight, None)
        return time.perf_counter() - start

    print(
        f"{torch.get_num_threads()} threads, {args.dtype} of a checkpoint in "
        f"{args.checkpoint}; milliseconds of a step"
    )
    print("| rows | vLLM | specinfer | ratio |\n|---|---|---|---|")
    for rows in args.rows:
        sizes = {weight.shape[1] for weight in weights}
        inputs = {size: torch.randn(rows, size).to(dtype) for size in sizes}
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(args.repeats + 2):
            for ours in (False, True):
                times[ours].append(seconds(inputs, ours))
        theirs, own = (statistics.median(times[way][2:]) * 1e3 for way in (False, True))
        print(f"| {rows} | {theirs:.1f} | {own:.1f} | {own / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
