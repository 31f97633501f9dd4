"""What vLLM's matrix products on a CPU keep in memory as the numbers of rows vary.

oneDNN keeps what it has made for a product's shape and number of rows, up to a number
of products, and tensors that come and go leave holes in between.

Run: .venv/bin/python benchmarks/onednn_memory.py [--capacity 0]
"""

import argparse
import os
import random

import psutil

# SmolLM2-135M's query, key and value together, and its output projection.
SHAPES = ((576, 960), (576, 576))
# Of a layer's own products vLLM keeps so many (vllm/model_executor/layers/utils.py).
OWN = 32


def main() -> None:
    """Print resident memory after more and more distinct products."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--capacity", type=int, help="of oneDNN's cache")
    parser.add_argument("--products", type=int, default=1536)
    args = parser.parse_args()
    if args.capacity is not None:
        os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(args.capacity)
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.set_num_threads(1)
    weights = [torch.ones(n, k) for k, n in SHAPES]
    handlers = [ops.create_onednn_mm(weight.t(), OWN) for weight in weights]
    process = psutil.Process()

    def report(count: int) -> None:
        mib = process.memory_info().rss / 2**20
        print(f"{count:5} products, {mib:.0f} MiB", flush=True)

    sizes = list(range(1, args.products // len(SHAPES) + 1))
    random.Random(0).shuffle(sizes)
    report(0)
    for count, rows in enumerate(sizes, 1):
        for handler in handlers:
            ops.onednn_mm(handler, torch.ones(rows, handler.k), None)
        if count % 128 == 0:
            report(count * len(SHAPES))


if __name__ == "__main__":
    main()
