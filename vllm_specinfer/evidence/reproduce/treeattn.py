"""Tree-parallel against sequence-parallel verification (SpecInfer, section 4.2).

Tree: the rows of a request's tree go through the tree kernel in one pass, with one K/V
for each node. Paths: each path from the root to a leaf is a request of its own for
vLLM's causal kernel, with K/V of its own for its tokens; the blocks of the context are
shared, as with vLLM's prefix cache. Without one every path has a context of its own:
the last column. Binary trees, SmolLM2-135M's shapes, one layer; times are medians of
calls in turn.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from tqdm import tqdm

from vllm_specinfer.evidence.cpu_attention import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_HEADS,
    Pages,
    causal_attention,
    measure,
)
from vllm_specinfer.evidence.engines import check_cpu
from vllm_specinfer.evidence.tables import Rows
from vllm_specinfer.kernels.cpu.tree_attention import tree_attention
from vllm_specinfer.tree.rows import TreeRows
from vllm_specinfer.tree.token_tree import TokenTree, ancestor_bits

KIB = 1024


def treeattn(
    batches: Sequence[int],
    nodes: Sequence[int],
    context: int,
    dtype: torch.dtype,
    seconds: float,
) -> Iterator[Rows]:
    """A row per batch and number of nodes; K/V in KiB per layer, for all requests.

    Args:
        batches: Requests.
        nodes: Of each one's tree.
        context: Positions before each tree, a multiple of the block size.
        dtype: Of K, V and queries.
        seconds: To measure each row.

    Yields:
        The rows so far.

    Raises:
        ValueError: The context does not fill its blocks, or this is no CPU.
    """
    check_cpu("treeattn")
    if context % BLOCK_SIZE:
        raise ValueError(f"context must be a multiple of {BLOCK_SIZE}; got {context}")
    rows = []
    cells = list(itertools.product(batches, nodes))
    for batch, n in tqdm(cells, desc="sizes"):
        sides = Sides(batch, n, context, dtype)
        calls = {"tree": sides.tree, "paths": sides.paths}
        micros = measure(calls, seconds, percentile=50)
        kib = sides.bytes_per_position / KIB
        rows.append(
            {
                "batch": batch,
                "nodes": n,
                "paths": sides.num_paths,
                "tree, us": micros["tree"],
                "paths, us": micros["paths"],
                "time, paths over tree": micros["paths"] / micros["tree"],
                "tree, KiB": kib * batch * (n + 1),
                "paths, KiB": kib * batch * sides.num_path_rows,
                "paths and contexts, KiB": kib
                * batch
                * (sides.num_path_rows + (sides.num_paths - 1) * context),
            }
        )
        yield rows


class Sides:
    """One step's tensors and both ways to attend.

    Attributes:
        num_paths: Of one tree.
        num_path_rows: All rows of one tree's paths, the root in each.
        bytes_per_position: K and V of one layer.
        tree: Attends the trees.
        paths: Attends the paths.
        tree_out: [batch * (nodes + 1), H, D], what `tree` writes.
        path_out: [batch * num_path_rows, H, D], what `paths` writes.
        path_rows: [batch * num_path_rows] the row of `tree_out` that each should be.
    """

    tree: Callable[[], object]
    paths: Callable[[], object]

    def __init__(
        self, batch: int, nodes: int, context: int, dtype: torch.dtype
    ) -> None:
        """Random queries, K and V; a path's are those of its tree's rows."""
        parents = np.arange(nodes) // 2 - 1
        shape = TokenTree(np.arange(nodes), parents.astype(np.int32))
        of_tree = [[0, *(i + 1 for i in path)] for path in shape.leaf_paths()]
        lengths = [len(path) for path in of_tree] * batch
        self.num_paths, self.num_path_rows = len(of_tree), sum(map(len, of_tree))

        # Each request's blocks: its context, its tree, one per path.
        before, width = context // BLOCK_SIZE, -(-(nodes + 1) // BLOCK_SIZE)
        own = before + width + len(of_tree)
        pages = Pages(batch * own, dtype)
        blocks = torch.arange(batch * own).view(batch, own).int()
        shared = blocks[:, None, :before].expand(-1, len(of_tree), -1)
        path_blocks = torch.cat([shared, blocks[:, before + width :, None]], 2)
        tree_slots, path_slots, path_rows = [], [], []
        for r, path in itertools.product(range(batch), enumerate(of_tree)):
            first = (r * own + before) * BLOCK_SIZE
            tree_slots += [first + row for row in path[1]]
            start = int(path_blocks[r, path[0], -1]) * BLOCK_SIZE
            path_slots += range(start, start + len(path[1]))
            path_rows += [r * (nodes + 1) + row for row in path[1]]
        self.path_rows = torch.tensor(path_rows)
        for part in (pages.key, pages.value):
            part[path_slots] = part[tree_slots]
        pages.write()
        self.bytes_per_position = 2 * pages.key[0].nbytes

        query = torch.randn(batch * (nodes + 1), NUM_HEADS, HEAD_SIZE).to(dtype)
        self.tree_out = torch.empty_like(query)
        bits = torch.tensor(ancestor_bits(shape.parents[None])[0])
        rows = TreeRows(
            is_tree=torch.ones(batch, dtype=torch.bool),
            context_lens=torch.full((batch,), context).int(),
            ancestor_bits=bits.repeat(batch, 1),
            all_tree=True,
        )
        arguments = (
            *(query, pages.cache, self.tree_out, blocks[:, : before + width]),
            torch.arange(batch + 1).int() * (nodes + 1),
            torch.full((batch,), context + nodes + 1).int(),
            *(rows, HEAD_SIZE**-0.5),
        )
        self.tree = lambda: tree_attention(*arguments, isa=pages.isa)
        path_query = query[self.path_rows]
        self.path_out = torch.empty_like(path_query)
        self.paths = causal_attention(
            path_query,
            pages,
            self.path_out,
            path_blocks.flatten(0, 1).contiguous(),
            torch.tensor([0, *itertools.accumulate(lengths)]).int(),
            torch.tensor(lengths).int() + context,
        )
