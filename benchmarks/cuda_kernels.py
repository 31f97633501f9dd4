"""The Triton kernels on a GPU: whether they are right, and how long attention takes.

First every kernel against its definition in torch, on the cases of `tests/kernels` and
larger ones. Then one layer of tree attention (32 query heads, 8 KV heads, head size
128, bfloat16, blocks of 16, a root and N nodes per request) beside vLLM's Triton
unified attention with its causal mask on the same cache, and beside xFormers' tree
attention and FlexAttention on K/V that lie consecutively. Medians of captured graphs,
the L2 cache flushed before each; building masks is not counted. What is not installed,
fails, or no longer fits into --deadline is left out with a note.

Run: python benchmarks/cuda_kernels.py --out runs/cuda
Without a GPU: TRITON_INTERPRET=1 python benchmarks/cuda_kernels.py --check-only
"""

import argparse
import importlib
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))
import commit_cases
import interpreter
import tree_attention_cases

from vllm_specinfer.evidence.tables import markdown, write_csv
from vllm_specinfer.kernels.triton.row_blocks import RowBlocks
from vllm_specinfer.kernels.triton.tiles import rows_per_block
from vllm_specinfer.kernels.triton.tree_attention import tree_attention
from vllm_specinfer.plots import figure_for
from vllm_specinfer.tree.rows import TreeRows
from vllm_specinfer.tree.token_tree import ancestor_bits

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
SIZES = {"nodes": (8, 16, 32, 64), "context": (1024, 4096, 32768), "batch": (1, 8, 32)}
GOAL = 1.10
# Kernels whose tests, `test_triton_<name>.py` in `tests/kernels`, run on any device.
TESTED = (
    "verification",
    "coupled",
    "drawn",
    "penalties",
    "lookups",
    "growth",
    "trees",
    "union",
    "catch_up",
    "row_blocks",
    "step_rows",
)
CSV_FILE, TABLE_FILE, PLOT_FILE = "attention.csv", "attention.md", "attention.png"


def main(arguments: list[str] | None = None) -> int:
    """Check, then measure; how many kernels are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check-only", action="store_true")
    only.add_argument("--time-only", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/cuda"))
    parser.add_argument("--rep", type=int, default=30, help="ms per measurement")
    parser.add_argument("--deadline", type=float, default=420, help="seconds")
    args = parser.parse_args(arguments)
    start = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        interpreter.prepare()
    num_failed = 0
    if not args.time_only:
        num_failed = sum([_fails(*check) for check in checks(device)])
        print(f"checks: {num_failed} failed, {time.perf_counter() - start:.0f} s")
    if not args.check_only:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        args.out.mkdir(parents=True, exist_ok=True)
        table = ""
        for rows in measure(args.rep, start + args.deadline):
            table = write(rows, args.out)
        print(table)
    return num_failed


# Checks.


def checks(device: str) -> Iterable[tuple[str, Callable[[], None]]]:
    """Name and call of each check; a call raises where a kernel is wrong."""
    yield "commit", lambda: _check_commit(device)
    for name in TESTED:
        yield name, lambda name=name: _check_tests(name, device)
    steps = [tree_attention_cases.small_steps()]
    if device == "cuda":
        yield "tree attention, replayed", _check_replay
        yield "tree attention, as FlexAttention's", _check_flex
        yield "xFormers' tree attention behind our interface", _check_xformers
        steps.append(tree_attention_cases.large_steps())
    for arguments, options in itertools.chain(*steps):
        query, kv_cache = arguments["query"], arguments["kv_cache"]
        name = f"tree attention, {query.dtype}, {kv_cache.dtype}, {query.shape[2]}"
        yield f"{name}, {options}", lambda a=arguments, o=options: _check(a, o, device)


def _fails(name: str, check: Callable[[], None]) -> bool:
    try:
        check()
    except Exception as error:  # a wrong kernel must not hide the next one
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        fails = missing != "xformers"
        print("FAILED" if fails else "left out:", f"{name}: {error}", flush=True)
        return fails
    return False


def _check(arguments: dict, options: dict, device: str) -> None:
    cases = tree_attention_cases
    arguments, options = cases.on(device, arguments), cases.on(device, options)
    cases.assert_close(*cases.run(arguments, options))


def _check_replay() -> None:
    """A graph must serve another step's trees, lengths and blocks."""
    cases = tree_attention_cases
    first, second = (
        cases.on("cuda", cases.step(requests, seed))
        for seed, requests in enumerate((cases.LARGE, cases.LARGE[::-1]))
    )
    out, expected = first["query"].new_full((2, *first["query"].shape), torch.nan)

    def attend() -> None:
        blocks = cases.row_blocks_of(first, 129, chains=True)
        bounds = {"max_query_len": 129, "num_programs": 40}
        tree_attention(**first, out=out, row_blocks=blocks, **bounds)

    replay = _captured(attend)
    for name, value in second.items():
        if isinstance(value, torch.Tensor):
            first[name].copy_(value)
    for name, value in vars(second["tree"]).items():
        if isinstance(value, torch.Tensor):
            getattr(first["tree"], name).copy_(value)
    out.fill_(torch.nan)
    replay()
    cases.tree_attention_ref(**second, out=expected, chains=True)
    cases.assert_close(out, expected)


def _check_flex() -> None:
    """FlexAttention as another definition."""
    shape = Shape(nodes=16, context=300, batch=2)
    ours(shape)()
    found = flex(shape)().transpose(1, 2).reshape(shape.out.shape)
    torch.testing.assert_close(shape.out, found, rtol=2e-2, atol=2e-2)


def _check_xformers() -> None:
    """xFormers, our kernel and the definition agree."""
    import xformers_cases

    for arguments, options in xformers_cases.steps():
        on_gpu = tree_attention_cases.on("cuda", arguments)
        found, expected = xformers_cases.run(on_gpu, options)
        tree_attention_cases.assert_close(found, expected)
        tree_attention_cases.assert_close(*tree_attention_cases.run(on_gpu, options))


def _check_commit(device: str) -> None:
    for seed in commit_cases.SEEDS:
        found, arguments = commit_cases.commit_case(seed, device)
        expected, _ = commit_cases.commit_case(seed, device)
        commit_cases.run(found, arguments)
        commit_cases.commit_paths_ref(expected, **arguments)
        for a, b in zip(found, expected, strict=True):
            assert (
                a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))
            ), f"seed {seed}"


def _check_tests(name: str, device: str) -> None:
    """All that a kernel's tests ask of the outputs of their cases."""
    tests = importlib.import_module(f"test_triton_{name}")
    checks = [
        function
        for _, function in inspect.getmembers(tests, inspect.isfunction)
        if list(inspect.signature(function).parameters) == ["outputs"]
    ]
    if not checks:
        raise ValueError(f"{tests.__name__} must have a function of `outputs` alone")
    outputs = tests.cases.outputs(device)
    for check in checks:
        check(outputs)


# Times.


class Shape:
    """One step's tensors, K/V in pages and consecutively."""

    def __init__(self, nodes: int, context: int, batch: int) -> None:
        rows, length = nodes + 1, context + nodes + 1
        width = -(-length // BLOCK_SIZE)
        self.batch, self.rows, self.context, self.length = batch, rows, context, length
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        # As vLLM lays them out for its Triton backend: positions first.
        pages = (batch * width, BLOCK_SIZE, NUM_KV_HEADS, 2 * HEAD_SIZE)
        self.kv_cache = torch.randn(pages, **options).transpose(1, 2)
        blocks = torch.randperm(batch * width, device="cuda").view(batch, width)
        self.block_table = blocks.int()
        self.query = torch.randn(batch * rows, NUM_HEADS, HEAD_SIZE, **options)
        self.out = torch.empty_like(self.query)
        self.query_start_loc = torch.arange(batch + 1, device="cuda").int() * rows
        self.seq_lens = torch.full((batch,), length, device="cuda").int()
        # A binary tree below each root.
        self.mask = torch.eye(rows, dtype=torch.bool)
        for i in range(1, rows):
            self.mask[i] |= self.mask[(i - 1) // 2]
        self.mask = self.mask.cuda()
        parents = np.arange(rows - 1, dtype=np.int32) // 2 - 1
        words = torch.tensor(ancestor_bits(parents[None])[0])
        self.tree = TreeRows(
            is_tree=torch.ones(batch, dtype=torch.bool, device="cuda"),
            context_lens=torch.full((batch,), context, device="cuda").int(),
            ancestor_bits=words.cuda().repeat(batch, 1),
            all_tree=True,
        )

    def consecutive(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [batch, length, Hkv, D]."""
        positions = self.kv_cache[self.block_table.long()].transpose(2, 3)
        key, value = positions.flatten(1, 2)[:, : self.length].chunk(2, dim=-1)
        return key.contiguous(), value.contiguous()


def ours(shape: Shape) -> Callable[[], object]:
    """Our kernel, and its programs' rows, which all layers of a step share."""
    group, itemsize = NUM_HEADS // NUM_KV_HEADS, shape.query.element_size()
    per_request = -(
        -shape.rows // rows_per_block(shape.rows, group, HEAD_SIZE, itemsize)
    )
    blocks = RowBlocks.uniform(shape.batch, per_request, shape.query.device)
    return lambda: tree_attention(
        shape.query,
        shape.kv_cache,
        shape.out,
        shape.block_table,
        shape.query_start_loc,
        shape.seq_lens,
        shape.tree,
        HEAD_SIZE**-0.5,
        max_query_len=shape.rows,
        row_blocks=blocks,
    )


def vllm(shape: Shape) -> Callable[[], object]:
    """vLLM's Triton kernel; its rows see all nodes before them."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    key, value = shape.kv_cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
    return lambda: unified_attention(
        q=shape.query,
        k=key,
        v=value,
        out=shape.out,
        cu_seqlens_q=shape.query_start_loc,
        max_seqlen_q=shape.rows,
        seqused_k=shape.seq_lens,
        max_seqlen_k=shape.length,
        softmax_scale=HEAD_SIZE**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=shape.block_table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )


def xformers(shape: Shape) -> Callable[[], object]:
    """xFormers' tree attention: context and nodes apart, then merged."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
    from xformers.ops.tree_attention import tree_attention as attend

    batch, context, group = shape.batch, shape.context, NUM_HEADS // NUM_KV_HEADS
    keys_values = [
        x.unsqueeze(3).expand(-1, -1, -1, group, -1)
        for part in shape.consecutive()
        for x in (part[:, context:].contiguous(), part[:, :context].contiguous())
    ]
    spec_k, cache_k, spec_v, cache_v = keys_values
    query = shape.query.view(batch, shape.rows, NUM_KV_HEADS, group, HEAD_SIZE)
    zeros = torch.zeros_like(shape.mask, dtype=query.dtype)
    spec_bias = zeros.masked_fill(~shape.mask, -torch.inf)
    prefix_bias = BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[shape.rows] * batch, kv_seqlen=[context] * batch, kv_padding=context
    )
    return lambda: attend(
        query, spec_k, spec_v, cache_k, cache_v, spec_bias, prefix_bias
    )


def flex(shape: Shape) -> Callable[[], object]:
    """FlexAttention, compiled, with the tree as its mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    mask, context = shape.mask, shape.context

    def visible(b, h, row, position):
        node = (position - context).clamp(min=0)
        return (position < context) | mask[row, node]

    block_mask = create_block_mask(
        visible, None, None, shape.rows, shape.length, device="cuda"
    )
    key, value = (x.transpose(1, 2) for x in shape.consecutive())
    query = shape.query.view(shape.batch, shape.rows, NUM_HEADS, HEAD_SIZE)
    query = query.transpose(1, 2).contiguous()
    attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(query, key, value, block_mask=block_mask, enable_gqa=True)


COLUMNS = {"tree": ours, "vllm": vllm, "xformers": xformers, "flex": flex}


def measure(rep: int, deadline: float) -> Iterable[list[dict[str, float]]]:
    """Microseconds per shape and column, once more after each column.

    Args:
        rep: Milliseconds per measurement.
        deadline: When to stop, as `time.perf_counter` counts.
    """
    from triton.testing import do_bench

    shapes = [
        dict(zip(SIZES, s, strict=True)) for s in itertools.product(*SIZES.values())
    ]
    rows: list[dict[str, float]] = [dict(shape) for shape in shapes]
    for name, make in COLUMNS.items():
        for row, sizes in zip(rows, shapes, strict=True):
            if time.perf_counter() > deadline:
                print(f"left out: {name} from {sizes} on, the time is up", flush=True)
                break
            try:
                call = make(Shape(**sizes))  # it holds what the graph reads
                replay = _captured(call)
                milliseconds = do_bench(replay, rep=rep, return_mode="median")
            except Exception as error:  # others' kernels may fail as they like
                print(f"left out: {name} at {sizes}: {error!r}"[:300], flush=True)
                if isinstance(error, ImportError):
                    break
                continue
            row[name] = milliseconds * 1e3
        yield rows


def _captured(call: Callable[[], object]) -> Callable[[], None]:
    """A call as a CUDA graph: the host's share of it does not count."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def write(rows: list[dict[str, float]], out: Path) -> str:
    """CSV, a Markdown table with ratios and the goals' counts, a picture.

    Returns:
        What is in the Markdown file.
    """
    others = list(COLUMNS)[1:]
    empty = dict.fromkeys([*SIZES, *COLUMNS])
    write_csv(out / CSV_FILE, [empty | row for row in rows])
    heads = [*SIZES, *COLUMNS, *(f"tree/{name}" for name in others)]
    table = []
    for row in rows:
        cells = [str(row[name]) for name in SIZES]
        cells += [f"{row[name]:.1f}" if name in row else "" for name in COLUMNS]
        cells += [f"{r:.2f}" if (r := _ratio(row, n)) else "" for n in others]
        table.append(cells)
    lines = [markdown(heads, table), "Microseconds per layer."]
    for name, goal in zip(others, (GOAL, 1.0, 1.0), strict=True):
        ratios = [r for row in rows if (r := _ratio(row, name))]
        within = sum(r <= goal for r in ratios)
        lines.append(f"At most {goal:.2f} of {name}: {within} of {len(ratios)}.")
    text = "\n".join(lines) + "\n"
    (out / TABLE_FILE).write_text(text)
    plot(rows, out / PLOT_FILE)
    return text


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Times of tree attention over vLLM's, a panel per context length."""
    figure = figure_for(path, 11, 3.5)
    if figure is None:
        return
    contexts = SIZES["context"]
    panels = figure.subplots(1, len(contexts), sharey=True)
    for panel, context in zip(panels, contexts, strict=True):
        for batch in SIZES["batch"]:
            points = [
                (row["nodes"], r)
                for row in rows
                if (row["context"], row["batch"]) == (context, batch)
                and (r := _ratio(row, "vllm"))
            ]
            if points:
                panel.plot(*zip(*points, strict=True), "o-", label=f"batch {batch}")
        panel.axhline(GOAL, color="gray", linestyle=":")
        panel.set(title=f"context {context}", xlabel="nodes", ylim=(0, None))
    panels[0].set_ylabel("time, tree / vLLM causal")
    panels[-1].legend()
    figure.savefig(path)


def _ratio(row: dict[str, float], name: str) -> float | None:
    return row["tree"] / row[name] if {"tree", name} <= row.keys() else None


if __name__ == "__main__":
    sys.exit(main() > 0)
