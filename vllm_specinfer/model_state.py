"""The target's model state: where trees enter and leave vLLM's step.

Life of a step, as vLLM's runner calls it (vllm/v1/worker/gpu/model_runner.py):
1. `preprocess_state` lays the live trees over the batch's rows,
2. `prepare_attn` hands each row's visibility to the attention builder,
3. `prepare_inputs` returns depth positions,
4. after the forward pass `TreeSampler` asks `plan_of` and calls `commit`,
   on CUDA `commit_walks`.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_specinfer.device import Once, is_host, read_later
from vllm_specinfer.scheduling.step_stats import COMMIT
from vllm_specinfer.tree.rows import WritesTreeRows
from vllm_specinfer.tree.table import StepPlan, TreeTable
from vllm_specinfer.verify.sampler import Accepted, TreeSampler

if TYPE_CHECKING:
    from vllm_specinfer.speculator import TreeSpeculator
    from vllm_specinfer.tree.device_plan import DevicePlan


class Walked(NamedTuple):
    """What a request has accepted.

    Attributes:
        req_id: Its id.
        slot: Its slot.
        nodes: The accepted nodes, by depth.
        num_rows: How many nodes had rows, those below the end of its tree included.
    """

    req_id: str
    slot: int
    nodes: list[int]
    num_rows: int


class TreeAttnMetadata(ModelSpecificAttnMetadata):
    """Adds the rows of a step's trees to the tree builders' arguments."""

    def __init__(self, rows: WritesTreeRows) -> None:
        self._rows = rows

    def get_extra_attn_kwargs(
        self, attn_metadata_builder: Any, num_reqs: int
    ) -> dict[str, Any]:
        """Keyword arguments for one builder; none for builders of others."""
        if getattr(attn_metadata_builder, "takes_trees", False):
            return {"tree": self._rows}
        return {}


class TreeModelState(DefaultModelState):
    """vLLM's default state plus the trees of the running requests."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: Any,
        device: torch.device,
        *,
        trees: TreeTable,
        drafter: "TreeSpeculator",
        tests_draws: bool,
        draft_layer_names: set[str],
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._trees = trees
        self._drafter = drafter
        self._tests_draws = tests_draws
        self._draft_layer_names = draft_layer_names
        self._planned: tuple[InputBatch | None, StepPlan | DevicePlan | None] = (
            None,
            None,
        )
        # One persistent buffer, so that captured graphs may read it.
        self._positions = torch.zeros(
            self.max_num_tokens, dtype=torch.int64, device=device
        )
        self._captured = False
        self._verifier: TreeSampler | None = None
        # Counts what the last step has accepted. Who sends a step's output may be
        # another thread than who runs the next one.
        self.count: Callable[[], None] = lambda: None
        # The last batch that was walked down on the device, and its paths.
        self._walked: tuple[InputBatch | None, torch.Tensor | None] = (None, None)
        self._block_tables: BlockTables | None = None
        # Per KV cache group that has layers of the target, what its attention backend
        # commits them with: `CPUCommit`, or `commit_paths` of the CUDA kernels.
        self._commits: dict[int, Callable[..., None]] = {}

    def plan_of(self, input_batch: InputBatch) -> "StepPlan | DevicePlan | None":
        """The plan made for exactly this batch; dummy batches have none."""
        batch, plan = self._planned
        return plan if batch is input_batch else None

    @property
    def sampler(self) -> TreeSampler:
        """Verifies the trees."""
        assert self._verifier is not None
        return self._verifier

    @property
    def num_logits(self) -> np.ndarray:
        """[R] rows of logits per request of the step that has been planned."""
        return np.diff(self._planned[0].cu_num_logits_np)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Start a request in a slot: whatever tree was there is stale."""
        super().add_request(req_index, new_req_data)
        self._trees.drop(req_index)
        self._verifier.bare_draws.start(req_index)
        self._drafter.start_request(req_index, new_req_data)

    def remove_request(self, req_id: str) -> None:
        """What is heard of it from now on is of nobody."""
        super().remove_request(req_id)
        self._drafter.end_request(req_id)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        """Remember whose K/V is to be committed."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        found = self.vllm_config.compilation_config.static_forward_context
        self._block_tables = block_tables
        self._commits = {}
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
            names = (n for n in group.layer_names if n not in self._draft_layer_names)
            if layers := [found[name] for name in names]:
                self._commits[group_id] = layers[0].impl.commit_paths_of(layers)

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Plan the step's trees."""
        super().preprocess_state(
            input_batch, block_tables, kv_cache_config, num_computed_tokens
        )
        plan = None
        if input_batch.num_draft_tokens_per_req is not None:
            plan = self._drafter.plan_ahead(input_batch) or self._trees.plan_step(
                input_batch.idx_mapping_np,
                input_batch.num_draft_tokens_per_req,
                input_batch.query_start_loc_np,
                # Exact where trees are the host's: it has waited for the step before.
                input_batch.num_computed_tokens_np,
            )
        self._planned = (input_batch, plan)

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """vLLM's attention metadata of the target, with the visibility of tree rows.

        vLLM would build it for the layers of the SSMs, too, which do not run here.
        """
        plan = self.plan_of(input_batch)
        if plan is not None:
            rows = plan.tree_rows(self.device, input_batch.num_tokens)
            kwargs["model_specific_attn_metadata"] = TreeAttnMetadata(rows)
        of_target = [
            [g for g in groups if not self._draft_layer_names.issuperset(g.layer_names)]
            for groups in attn_groups
        ]
        return super().prepare_attn(
            *(input_batch, cudagraph_mode, block_tables, slot_mappings, of_target),
            *args,
            **kwargs,
        )

    def prepare_inputs(
        self, input_batch: InputBatch, req_states: RequestState
    ) -> dict[str, Any]:
        """Model inputs, with positions by depth (siblings share one)."""
        inputs = super().prepare_inputs(input_batch, req_states)
        plan = self.plan_of(input_batch)
        if plan is None and not self._captured:
            return inputs
        positions = self._positions[: input_batch.num_tokens_after_padding]
        if plan is None:
            positions.copy_(input_batch.positions)
        else:
            plan.write_positions(positions)
        if self.rope_state is None:
            return {**inputs, "positions": positions}
        if plan is not None:
            # M-RoPE counts on behind a prompt in all dimensions alike.
            shift = (positions - input_batch.positions)[: input_batch.num_tokens]
            inputs["positions"][:, : len(shift)] += shift
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """Model inputs that a graph is captured with: every step must fill them."""
        self._captured = True
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        return {"positions": self._positions[:num_tokens], **inputs}

    def custom_sampler(self, sampler: Sampler) -> tuple[Any, Any]:
        """vLLM's sampler for plain rows, ours for trees."""
        self._drafter.bind_sampler(sampler)
        # FlashInfer draws by other random numbers than those that drafts are drawn by.
        sampler.use_flashinfer = False
        verifier, commit = TreeSampler, self.commit
        if not is_host(self.device):
            # Its kernels need Triton.
            from vllm_specinfer.verify.device_sampler import DeviceTreeSampler

            verifier, commit = DeviceTreeSampler, self.commit_walks
        self._verifier = verifier(
            sampler,
            self.plan_of,
            self._positions,
            commit,
            self._drafter.on_time,
            self._tests_draws,
        )
        return sampler, self._verifier

    def commit(self, input_batch: InputBatch, accepted: Accepted) -> None:
        """Keep accepted rows: K/V to the slots right after the root, in all layers.

        Args:
            input_batch: The verified batch; its slot mappings are still in place.
            accepted: Per batch index the accepted rows, from depth 1 down.
        """
        started = time.perf_counter()
        walked = _by_request(input_batch, accepted)
        self.count = self._drafter.on_verified(lambda: walked)
        # Rows rise: the last one is in its place where all are.
        moved = [i for i, path in accepted.items() if path and path[-1] != len(path)]
        if moved:
            roots = input_batch.query_start_loc_np[moved].tolist()
            paths = [accepted[i] for i in moved]
            for group_id, commit in self._commits.items():
                commit(self._block_tables.slot_mappings[group_id], roots, paths)
        self._drafter.on_time(COMMIT, time.perf_counter() - started)

    def path_of(self, input_batch: InputBatch) -> torch.Tensor:
        """[R, N] accepted rows of a batch from depth 1 down, as `commit_walks` got
        them; N = 1 and any where it has no trees."""
        batch, path = self._walked
        if batch is input_batch:
            return path
        return torch.zeros_like(input_batch.idx_mapping)[:, None]

    def commit_walks(
        self, input_batch: InputBatch, path: torch.Tensor, count: torch.Tensor
    ) -> None:
        """`commit` where the device has walked; the host hears of it later.

        Args:
            input_batch: As in `commit`.
            path: [R, N] int32 accepted rows of each request, from depth 1 down.
            count: [R] int32 how many they are.
        """
        started = time.perf_counter()
        self._walked = input_batch, path
        first = input_batch.query_start_loc[: len(path)]
        for group_id, commit in self._commits.items():
            commit(self._block_tables.slot_mappings[group_id], first, path, count)
        self._drafter.on_time(COMMIT, time.perf_counter() - started)
        walks, plan = read_later(path, count), self.plan_of(input_batch)

        def walked() -> list[Walked]:
            paths, counts = walks()
            accepted = {i: paths[i, : counts[i]].tolist() for i in plan.tree_requests}
            return _by_request(input_batch, accepted)

        self.count = self._drafter.on_verified(Once(walked))


def _by_request(input_batch: InputBatch, accepted: Accepted) -> list[Walked]:
    """By request what `accepted` has by batch index."""
    num_rows = input_batch.num_draft_tokens_per_req
    return [
        Walked(
            input_batch.req_ids[i],
            int(input_batch.idx_mapping_np[i]),
            [row - 1 for row in path],
            int(num_rows[i]),
        )
        for i, path in accepted.items()
    ]
