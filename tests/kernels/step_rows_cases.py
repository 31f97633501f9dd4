"""Steps over trees that the device knows, and what is laid over their rows."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_specinfer.tree.candidates import NO_TOKEN, FinishedTrees
from vllm_specinfer.tree.rows import TreeRows
from vllm_specinfer.tree.table import StepPlan, TreeTable
from vllm_specinfer.tree.token_tree import (
    NO_NODE,
    ROOT,
    ancestor_bits,
    node_depths,
    num_words,
)

SEEDS = range(40)
SLOTS, NODES = 6, 70
# Rows and positions behind a step's, which are padding.
PADDING = 5
CPU = torch.device("cpu")


class Step:
    """Some requests with a prefix of their trees, or with other rows."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.num_reqs = num_reqs = int(rng.integers(1, SLOTS + 1))
        self.slots = rng.permutation(SLOTS)[:num_reqs]
        # Others than the step's have trees, too.
        shape = SLOTS, NODES
        sizes = rng.integers(0, NODES + 1, SLOTS)
        self.exists = np.arange(NODES) < sizes[:, None]
        self.parents = rng.integers(ROOT, np.arange(NODES), shape, np.int32)
        self.tokens = rng.integers(0, 1000, shape)
        self.computed = rng.integers(0, 1000, SLOTS)
        self.scheduled = np.array(
            [rng.integers(0, sizes[slot] + 1) for slot in self.slots]
        )
        more = rng.integers(0, 2, num_reqs)
        if seed % 4 == 0:
            more[0] = 3000  # a prompt, of more rows than a program writes at once
        counts = 1 + self.scheduled + more
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

    def on_host(self) -> StepPlan | None:
        """Its plan where the host knows the trees."""
        table = TreeTable(SLOTS, NODES)
        for exists in (np.ones_like(self.exists), self.exists):
            trees = replace(
                FinishedTrees.none(SLOTS, NODES),
                tokens=np.where(exists, self.tokens, NO_TOKEN),
                parents=np.where(exists, self.parents, ROOT),
            )
            draws = [{} for _ in range(SLOTS)]
            table.write(np.arange(SLOTS), trees, self.computed, draws)
        return table.plan_step(
            self.slots, self.scheduled, self.starts, self.computed[self.slots]
        )

    def on_device(self, drafted: np.ndarray, device: torch.device) -> Any:
        """Its plan where only the device does."""
        from vllm_specinfer.tree.device_plan import DevicePlan
        from vllm_specinfer.tree.on_device import TreeBuffers

        buffers = TreeBuffers(SLOTS, NODES, NODES, device)
        known = np.where(self.exists, self.parents, ROOT)
        for buffer, values in (
            (buffers.tokens, np.where(self.exists, self.tokens, 0)),
            (buffers.parents, np.where(self.exists, self.parents, NO_NODE)),
            (buffers.depths, node_depths(known)),
            (buffers.bits, ancestor_bits(known)),
        ):
            buffer[:SLOTS] = torch.tensor(values)
        batch = SimpleNamespace(
            idx_mapping=torch.from_numpy(self.slots).to(device),
            idx_mapping_np=self.slots,
            num_draft_tokens_per_req=self.scheduled.astype(np.int32),
            query_start_loc=torch.from_numpy(self.starts).to(device),
            query_start_loc_np=self.starts,
        )
        computed = torch.from_numpy(self.computed.astype(np.int32)).to(device)
        return DevicePlan.of(batch, drafted, buffers, computed)


def laid(step: Step, plan: Any, device: torch.device = CPU) -> dict[str, Any] | None:
    """What a plan on a device says, None where there is none."""
    if plan is None:
        return None
    num_rows = int(step.starts[-1])
    words = num_words(NODES + 1)
    trees = TreeRows(
        torch.ones(step.num_reqs + 1, dtype=torch.bool, device=device),
        torch.full((step.num_reqs + 1,), 7, dtype=torch.int32, device=device),
        torch.full((num_rows + PADDING, words), 7, device=device),
    )
    plan.tree_rows(device, num_rows).write_to(trees)
    positions = torch.full((num_rows + PADDING,), 7, device=device)
    plan.write_positions(positions)
    walked = plan.walked_trees(device)._asdict()
    return {
        "is_tree": trees.is_tree.cpu(),
        "context_lens": trees.context_lens.cpu(),
        "bits": trees.ancestor_bits.cpu(),
        "positions": positions.cpu(),
        "walked": {name: values.cpu() for name, values in walked.items()},
        "rows": plan.num_rows.tolist(),
        "all_tree": plan.all_tree,
        "paths": [plan.paths(i) for i in plan.tree_requests],
    }


def outputs(device: str = "cpu") -> list[tuple[dict | None, dict | None]]:
    """What is laid over every step, with all trees drafted, and all but the first."""
    found, where = [], torch.device(device)
    for step in map(Step, SEEDS):
        drafted = np.ones(step.num_reqs, bool)
        others = np.arange(step.num_reqs) > 0
        plans = [step.on_device(have, where) for have in (drafted, others)]
        found.append(tuple(laid(step, plan, where) for plan in plans))
    return found
