"""Random steps of tree attention, and what the Triton kernels make of them."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from vllm_specinfer.attention.reference import attend_rows
from vllm_specinfer.kernels.triton.row_blocks import RowBlocks, max_row_blocks
from vllm_specinfer.kernels.triton.tiles import rows_per_block
from vllm_specinfer.tree.rows import TreeRows
from vllm_specinfer.tree.token_tree import WORD_BITS, ancestor_bits, num_words

RANDOM_SEEDS = range(12)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


class Request(NamedTuple):
    """Nodes count the root; `rows` says which are query rows, None for all."""

    context: int
    num_nodes: int
    is_tree: bool = True
    rows: list[int] | None = None


MIXED = [
    Request(37, 9),
    Request(50, 3, is_tree=False),
    Request(0, 5),
    Request(16, 1),
    Request(20, 12, rows=[7, 9, 11]),
]
LARGE = [
    Request(1500, 65),
    Request(700, 129),
    Request(3, 33),
    Request(2100, 17, is_tree=False),
    Request(900, 64, rows=list(range(40, 64))),
    Request(64, 1),
]


def step(
    requests: list[Request],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    head_size: int = 32,
    num_kv_heads: int = 2,
    group: int = 2,
    block_size: int = 16,
    kv_dtype: torch.dtype | None = None,
    sinks: bool = False,
    words: int | None = None,
    positions_first: bool = False,
) -> dict[str, Any]:
    """Arguments of `tree_attention` and `tree_attention_ref` but for `out`.

    The step ends with a request without rows and three rows of no request, as a
    captured graph has them. Slots that nobody wrote hold NaN, and so do those of nodes
    that no row sees.
    """
    rng = np.random.default_rng(seed)
    seq_lens = [r.context + r.num_nodes for r in requests]
    width = -(-max(seq_lens) // block_size)
    num_blocks = len(requests) * width + 2
    table = rng.permutation(num_blocks)[: len(requests) * width].reshape(-1, width)
    words = words or num_words(max(r.num_nodes for r in requests))
    rows, bits, seen = [], [], []
    for request in requests:
        indices = request.rows or range(request.num_nodes)
        rows.append(len(indices))
        visible = np.zeros((len(indices), words), np.int64)
        if request.is_tree:
            parents = [
                rng.integers(max(-1, i - 6), i) for i in range(request.num_nodes - 1)
            ]
            of_tree = ancestor_bits(np.array([parents], np.int32).reshape(1, -1))[0]
            visible[:, : of_tree.shape[1]] = of_tree[list(indices)]
        bits.append(visible)
        nodes = np.arange(request.num_nodes)
        if request.is_tree:
            nodes = nodes[(visible[:, nodes // 64] >> nodes % 64 & 1).any(axis=0)]
        seen.append(nodes)
    bits.append(np.zeros((3, words), np.int64))
    num_rows, num_heads = sum(rows) + 3, num_kv_heads * group
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    shape = (num_blocks, block_size, num_kv_heads, 2 * head_size)
    kv_cache = torch.full(shape, torch.nan)
    places = zip(requests, seen, torch.from_numpy(table), strict=True)
    for request, nodes, blocks in places:
        at = torch.from_numpy(
            np.append(np.arange(request.context), request.context + nodes)
        )
        written = normal(len(at), num_kv_heads, 2 * head_size).float()
        kv_cache[blocks[at // block_size], at % block_size] = written
    kv_cache = kv_cache.to(kv_dtype or dtype).transpose(1, 2)
    arguments: dict[str, Any] = {
        # Strided like the query part of a fused QKV projection.
        "query": normal(num_rows, num_heads + 2, head_size)[:, 1:-1],
        "kv_cache": kv_cache if positions_first else kv_cache.contiguous(),
        "block_table": torch.from_numpy(np.vstack([table, table[-1:]])).int(),
        "query_start_loc": torch.tensor([0, *rows, 0]).cumsum(0).int(),
        "seq_lens": torch.tensor([*seq_lens, 0]).int(),
        "tree": TreeRows(
            is_tree=torch.tensor([*(r.is_tree for r in requests), True]),
            context_lens=torch.tensor([*(r.context for r in requests), 7]).int(),
            ancestor_bits=torch.from_numpy(np.vstack(bits)),
        ),
        "scale": head_size**-0.5,
    }
    if sinks:
        arguments["sinks"] = torch.linspace(-2, 6, num_heads).to(dtype)
    if kv_dtype is not None:
        arguments |= {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([1.7])}
    return arguments


def small_steps() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Steps that Triton's interpreter runs in a second, and options for both."""
    for dtype in TOLERANCE:
        yield step(MIXED, dtype=dtype), {}
    yield step(MIXED), {"chains": True}
    yield step(MIXED, head_size=80, num_kv_heads=1, group=7), {}
    yield step(MIXED, dtype=torch.bfloat16, head_size=256, group=1), {}
    yield step(MIXED, kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16), {}
    yield step(MIXED, sinks=True, positions_first=True), {"softcap": 0.7}
    yield step([Request(9, 70), Request(70, 129)], num_kv_heads=1), {}
    wide = [Request(300, 9), Request(10, 20, is_tree=False), Request(150, 3)]
    one_head = {"seed": 3, "num_kv_heads": 1}
    yield step(wide, **one_head, sinks=True), {"num_programs": 10, "chains": True}
    yield step(wide, **one_head, head_size=96, words=3), {"num_programs": 16}
    for options in ({}, {"num_programs": 7}):
        yield step(wide, **one_head), {"window": 64, "chains": True, **options}
    # All that may be split is, behind rows that are not attended.
    full = [Request(200, 40, is_tree=False), Request(300, 32)]
    yield step(full, **one_head), {"num_programs": 4}
    # As a level of trees that grow, of which one has most nodes.
    level = [Request(40, 1), Request(90, 20), *(Request(0, 2) for _ in range(5))]
    for num_programs in (1, 90):
        arguments = step(level, num_kv_heads=1, group=8)
        blocks = RowBlocks.uniform(len(level) + 1, -(-20 // 4), torch.device("cpu"))
        yield arguments, {"row_blocks": blocks, "num_programs": num_programs}
    yield from map(random_step, RANDOM_SEEDS)


def random_step(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A step of any shape that has one, and options for both."""
    rng = np.random.default_rng(seed)

    def any_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    requests = []
    for most in (128, 20, 20, 3)[-rng.integers(1, 5) :]:
        num_nodes = int(rng.integers(1, most + 1))
        rows = rng.random(num_nodes) < 0.5
        chosen = rows.nonzero()[0].tolist() if rows.any() else None
        is_tree = bool(rng.random() < 0.7)
        context = int(rng.integers(0, any_of(4, 40, 200)))
        rows = any_of(chosen, None) if is_tree else None
        requests.append(Request(context, num_nodes, is_tree, rows))
    arguments = step(
        requests,
        seed=seed,
        dtype=any_of(*TOLERANCE),
        head_size=any_of(32, 64, 80, 96, 128),
        num_kv_heads=any_of(1, 2),
        group=any_of(1, 2, 3, 4, 7, 8),
        block_size=any_of(16, 32, 48, 128),
        kv_dtype=any_of(None, None, torch.float8_e4m3fn),
        sinks=any_of(False, True),
        words=any_of(None, 3),
        positions_first=any_of(False, True),
    )
    num_words = arguments["tree"].ancestor_bits.shape[1]
    return arguments, {
        "chains": any_of(False, True),
        "num_programs": any_of(None, 1, 6, 25),
        "softcap": any_of(0.0, 0.0, 3.0),
        "window": any_of(0, 0, 64 * num_words, 64 * num_words + 70),
    }


def large_steps() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Steps for a GPU: every type and head size, many nodes, long contexts."""
    head_sizes = [32, 64, 80, 96, 112, 128, 160, 192, 256]
    types = [(torch.bfloat16, None, size) for size in head_sizes]
    for dtype, kv_dtype in (
        (torch.float32, None),
        (torch.float16, None),
        (torch.bfloat16, torch.float8_e4m3fn),
    ):
        types += [(dtype, kv_dtype, size) for size in (64, 128, 256)]
    # Every compilation takes seconds, so the other choices take turns.
    groups, programs = itertools.cycle((1, 4, 7)), itertools.cycle((None, 1, 300, 90))
    for (dtype, kv_dtype, head_size), group, num_programs in zip(
        types, groups, programs, strict=False
    ):
        arguments = step(
            LARGE,
            dtype=dtype,
            kv_dtype=kv_dtype,
            head_size=head_size,
            group=group,
            sinks=group == 4,
            positions_first=group == 7,
        )
        window = 192 if head_size in (96, 256) else 0
        yield (
            arguments,
            {"num_programs": num_programs, "chains": True, "window": window},
        )


def on(device: torch.device | str, value: Any) -> Any:
    """An argument, or several by name, on a device."""
    if isinstance(value, dict):
        return {k: on(device, v) for k, v in value.items()}
    if isinstance(value, TreeRows | RowBlocks):
        return type(value)(**on(device, vars(value)))
    return value.to(device) if isinstance(value, torch.Tensor) else value


def run(arguments: dict[str, Any], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What the kernels write, and the definition; NaN where neither does."""
    from vllm_specinfer.kernels.triton import tree_attention as kernels

    query = arguments["query"]
    found, expected = query.new_full((2, *query.shape), torch.nan)
    for_ref = {
        k: v for k, v in options.items() if k not in ("num_programs", "row_blocks")
    }
    for_kernel = {k: v for k, v in options.items() if k != "chains"}
    most_rows = int(arguments["query_start_loc"].diff().max())
    if "row_blocks" not in options:
        chains = options.get("chains", False)
        for_kernel["row_blocks"] = row_blocks_of(arguments, most_rows, chains)
    with mock.patch.object(kernels, "MIN_TILES_PER_SPLIT", 1):
        kernels.tree_attention(
            **arguments, out=found, **for_kernel, max_query_len=most_rows
        )
    tree_attention_ref(**arguments, out=expected, **for_ref)
    return found, expected


def row_blocks_of(
    arguments: dict[str, Any], max_query_len: int, chains: bool
) -> RowBlocks:
    """Blocks of the rows of a step's trees, and with chains of all other requests."""
    query, tree = arguments["query"], arguments["tree"]
    starts, num_kv_heads = arguments["query_start_loc"], arguments["kv_cache"].shape[1]
    most_rows = min(max_query_len, tree.ancestor_bits.shape[1] * WORD_BITS)
    rows = rows_per_block(
        *(most_rows, query.shape[1] // num_kv_heads),
        *(query.shape[2], query.element_size()),
    )
    most = max_row_blocks(len(query), len(starts) - 1, rows)
    blocks = RowBlocks.room(most, query.device)
    blocks.fill(starts, rows, tree.is_tree | chains)
    return blocks


def tree_attention_ref(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    tree: TreeRows,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    *,
    window: int = 0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    chains: bool = False,
) -> None:
    """`tree_attention` in plain torch, for a window of any size."""
    block_size = kv_cache.shape[2]

    def keys_values(r: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = block_table[r, : -(-length // block_size)].long()
        positions = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length].float()
        key, value = positions.chunk(2, dim=-1)
        if k_scale is None:
            return key, value
        return key * k_scale, value * v_scale

    attend_rows(
        query,
        keys_values,
        out,
        query_start_loc,
        seq_lens,
        tree,
        scale,
        softcap,
        sinks,
        window,
        chains,
    )


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within a rounding, and in where nothing was written, which is NaN."""
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(
        found, expected, atol=tolerance, rtol=tolerance, equal_nan=True
    )


def outputs() -> list[tuple[torch.Tensor, ...]]:
    """What kernels and definition give."""
    return [run(*case) for case in small_steps()]
