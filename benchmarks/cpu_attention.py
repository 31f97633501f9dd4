"""Tree attention against vLLM's causal CPU kernel and against gathered SDPA.

Shapes of SmolLM2-135M: 9 query heads, 3 KV heads, head size 64. All columns are
microseconds per layer, medians of interleaved calls; vLLM's once-per-step scheduling
is not counted. On a busy machine, where medians count the scheduler's time slices, take
a lower --percentile. `vllm` may look at the same number of KV positions with its causal
mask; `sdpa` gets K/V already gathered and a boolean mask, `+gather` gathers them too.

Run: .venv/bin/python benchmarks/cpu_attention.py [--dtype bfloat16]
"""

import argparse
import itertools
from collections.abc import Callable

import numpy as np
import torch

from vllm_specinfer.evidence.cpu_attention import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    Pages,
    causal_attention,
    measure,
)
from vllm_specinfer.kernels.cpu.tree_attention import tree_attention
from vllm_specinfer.tree.rows import TreeRows
from vllm_specinfer.tree.token_tree import ancestor_bits

GOAL = 1.15


def columns(
    context: int, rows: int, batch: int, dtype: torch.dtype, shared: int = 0
) -> dict[str, Callable[[], object]]:
    """One call per column on the same data."""
    seq_len = context + rows
    width = -(-seq_len // BLOCK_SIZE)
    num_blocks = batch * width
    pages = Pages(num_blocks, dtype)
    pages.write()
    block_table = torch.randperm(num_blocks).view(batch, width).int()
    same = shared // BLOCK_SIZE
    block_table[:, :same] = block_table[0, :same].clone()
    query = torch.randn(batch * rows, NUM_HEADS, HEAD_SIZE).to(dtype)
    out = torch.empty_like(query)
    query_start_loc = torch.arange(batch + 1).int() * rows
    seq_lens = torch.full((batch,), seq_len).int()
    scale = HEAD_SIZE**-0.5

    # A binary tree below each root.
    parents = np.arange(rows - 1, dtype=np.int32) // 2 - 1
    bits = torch.tensor(ancestor_bits(parents[None])[0])
    tree = TreeRows(
        is_tree=torch.ones(batch, dtype=torch.bool),
        context_lens=torch.full((batch,), context).int(),
        ancestor_bits=bits.repeat(batch, 1),
        all_tree=True,
    )
    mask = torch.ones(rows, seq_len, dtype=torch.bool)
    mask[:, context:] = (bits >> torch.arange(rows)) & 1 == 1
    shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    key_pages, value_pages = pages.key.view(shape), pages.value.view(shape)

    def gather() -> list[torch.Tensor]:
        return [
            x[block_table.long()].flatten(1, 2)[:, :seq_len].transpose(1, 2)
            for x in (key_pages, value_pages)
        ]

    sdpa_query = query.view(batch, rows, NUM_HEADS, HEAD_SIZE).transpose(1, 2)

    def sdpa(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            sdpa_query, key, value, mask, scale=scale, enable_gqa=True
        )

    gathered = gather()
    return {
        "tree": lambda: tree_attention(
            query,
            pages.cache,
            out,
            block_table,
            query_start_loc,
            seq_lens,
            tree,
            scale,
            isa=pages.isa,
        ),
        "vllm": causal_attention(
            query, pages, out, block_table, query_start_loc, seq_lens
        ),
        "sdpa": lambda: sdpa(*gathered),
        "+gather": lambda: sdpa(*gather()),
    }


def main() -> None:
    """Print the table and how many rows meet each goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], action="append")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--shared", type=int, default=0, help="positions that all requests begin with"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="per table row")
    parser.add_argument("--percentile", type=float, default=50)
    args = parser.parse_args()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    print(f"threads {threads}, percentile {args.percentile:g} of the calls")
    print(f"goal: tree at most {GOAL} of vllm and below sdpa")
    names = ["tree", "vllm", "sdpa", "+gather"]
    heads = ["dtype", "batch", "context", "rows", *names, "tree/vllm", "tree/sdpa"]
    print(" ".join(f"{head:>9}" for head in heads))
    met: list[tuple[bool, bool]] = []
    for dtype, batch, context, rows in itertools.product(
        args.dtype or ["bfloat16", "float32"], args.batches, args.contexts, args.rows
    ):
        calls = columns(context, rows, batch, getattr(torch, dtype), args.shared)
        micros = measure(calls, args.seconds, args.percentile)
        to_vllm, to_sdpa = (micros["tree"] / micros[name] for name in names[1:3])
        met.append((to_vllm <= GOAL, to_sdpa < 1))
        values = [f"{micros[name]:9.1f}" for name in names]
        values += [f"{to_vllm:9.2f}", f"{to_sdpa:9.2f}"]
        print(f"{dtype:>9} {batch:9} {context:9} {rows:9} " + " ".join(values))
    within, faster = (sum(column) for column in zip(*met, strict=True))
    print(
        f"within {GOAL} of vllm: {within}/{len(met)}; below sdpa: {faster}/{len(met)}"
    )


if __name__ == "__main__":
    main()
