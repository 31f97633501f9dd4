"""The speculator vLLM's runner calls after each step: catch up, grow, write trees."""

import functools
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig, replace
from vllm.model_executor.model_loader import get_model
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_specinfer.config import SpecInferConfig
from vllm_specinfer.drafting.children import ChildChooser
from vllm_specinfer.drafting.growth import GrownTrees, TreeGrowth
from vllm_specinfer.drafting.requests import DraftRequests
from vllm_specinfer.drafting.ssm import NeuralSSM
from vllm_specinfer.model_state import TreeModelState
from vllm_specinfer.tree.proposals import Draws
from vllm_specinfer.tree.table import TreeTable
from vllm_specinfer.tree.token_tree import ROOT, TokenTree


class TreeSpeculator(DraftModelSpeculator):
    """Proposes one token tree per request.

    Dimension legend: R requests of the batch, N nodes per tree.
    """

    # The catch-up pass runs the bonus token beside the target's rows.
    num_extra_query_per_req = 1

    speculative_config: SpecInferConfig

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        """Create the request rows.

        Args:
            vllm_config: The engine's config; its speculative config is ours.
            device: The worker's device.
            req_states: The runner's request states.
        """
        super().__init__(vllm_config, device)
        self._req_states = req_states
        self._requests = DraftRequests(self.max_num_reqs)
        self._trees = TreeTable(self.max_num_reqs, self.num_speculative_steps)
        self._chooser = ChildChooser(self.speculative_config.verification_rule)
        self._ssm_vllm_config = vllm_config
        self._ssm: NeuralSSM | None = None
        # The trees of the last batch by request id; the other requests have none.
        self.trees: dict[str, TokenTree] = {}

    @property
    def attn_vllm_config(self) -> VllmConfig:
        """The SSM's config: its builders need its head counts and dtype."""
        return self._ssm_vllm_config

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to prepare: no CUDA graphs are captured."""

    def capture(self) -> None:
        """Nothing to capture."""

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the SSM and hook the target's model state.

        Args:
            target_model: The loaded target.
            target_attn_layer_names: Its attention layers.

        Returns:
            The SSM.

        Raises:
            ValueError: The target brings a model state of its own.
        """
        if hasattr(target_model, "get_model_state_cls"):
            raise ValueError(
                "the target must use vLLM's default model state; got "
                f"{type(target_model).__name__} with its own"
            )
        self._ssm_vllm_config = replace(
            self.vllm_config,
            model_config=self.draft_model_config,
            quant_config=None,
            parallel_config=replace(
                self.speculative_config.draft_parallel_config,
                rank=self.vllm_config.parallel_config.rank,
            ),
        )
        with set_model_tag("ssm0"):
            ssm = get_model(vllm_config=self._ssm_vllm_config, prefix="ssm0")
        layers = self.vllm_config.compilation_config.static_forward_context
        state = functools.partial(
            TreeModelState,
            trees=self._trees,
            requests=self._requests,
            verification=self.speculative_config.verification_rule,
            draft_layer_names=set(layers) - target_attn_layer_names,
        )
        # vLLM reads two class attributes of what it is about to construct.
        state.supports_prompt_embeds = TreeModelState.supports_prompt_embeds
        state.__name__ = TreeModelState.__name__
        target_model.get_model_state_cls = lambda: state
        self._ssm = NeuralSSM(ssm, self._ssm_vllm_config, self._requests.num_caught_up)
        return ssm

    def set_attn(
        self,
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        target_input_buffers: InputBuffers,
        target_attn_groups: list[list[AttentionGroup]],
    ) -> None:
        """Bind the SSM to the KV cache; may be called again."""
        super().set_attn(
            model_state,
            kv_cache_config,
            block_tables,
            target_input_buffers,
            target_attn_groups,
        )
        self._ssm.bind(self.attn_groups, block_tables)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Grow the next trees (vllm/v1/worker/gpu/spec_decode/speculator.py).

        Args:
            input_batch: The batch just verified.
            attn_metadata: Unused: the SSM's own metadata is built here.
            slot_mappings: Unused.
            last_hidden_states: Unused.
            aux_hidden_states: Unused.
            num_sampled: [R] tokens emitted per request; 0 inside a prompt.
            num_rejected: Unused.
            *args: Unused.
            dummy_run: Profiling or compilation; request slots must not be touched.
            **kwargs: Unused.

        Returns:
            [R, N] int64 node tokens in flat order.
        """
        num_reqs = input_batch.num_reqs
        drafts = np.zeros((num_reqs, self.num_speculative_steps), np.int64)
        if dummy_run:
            n = input_batch.num_tokens
            self._ssm.dummy_forward(
                input_batch.input_ids[:n], input_batch.positions[:n]
            )
            return torch.from_numpy(drafts)
        slots = input_batch.idx_mapping_np
        self._trees.drop(slots)
        self.trees = {}
        growing, num_tokens, hidden = self._catch_up(input_batch, num_sampled.numpy())
        if len(growing):
            grown = slots[growing]
            trees, draws = self._grow(grown, num_tokens, hidden)
            drafts[growing] = trees.tokens
            for i, tree in zip(growing.tolist(), trees.each(), strict=True):
                self.trees[input_batch.req_ids[i]] = tree
            self._trees.write(grown, trees.parents, num_tokens - 1, draws)
        return torch.from_numpy(drafts)

    def _catch_up(
        self, input_batch: InputBatch, num_sampled: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, torch.Tensor | None]:
        """Bring the SSM up to date.

        Returns:
            [R'] batch indices of the requests that get a tree, [R'] their committed
            tokens, and [R', hidden] the SSM's hidden state at their last token.
        """
        states, slots = self._req_states, input_batch.idx_mapping_np
        total = states.total_len.gpu.numpy()[slots].astype(np.int64)
        computed = states.num_computed_tokens.gpu.numpy()[slots].astype(np.int64)
        wanted = np.minimum(total, computed + 1)
        part = np.flatnonzero(wanted > self._requests.num_caught_up[slots])
        if not len(part):
            return part, wanted[part], None
        hidden = self._ssm.catch_up(slots, states.all_token_ids.gpu.numpy(), wanted)
        grows = num_sampled[part] > 0
        growing = part[grows]
        return growing, wanted[growing], hidden[torch.from_numpy(grows)]

    def _grow(
        self, slots: np.ndarray, num_tokens: np.ndarray, hidden: torch.Tensor
    ) -> tuple[GrownTrees, list[dict[int, Draws]]]:
        """The trees of R' requests and, per request, the draws below each node."""
        growth = TreeGrowth(
            self.speculative_config.tree,
            self.num_speculative_steps,
            capacity=self._ssm.capacity(slots, num_tokens),
            max_depth=self.max_model_len - num_tokens,
        )
        roots = rows = self._requests.draft_rows(slots, num_tokens - 1)
        requests, nodes = np.arange(len(slots)), np.full(len(slots), ROOT)
        drawn: list[tuple[np.ndarray, np.ndarray, Draws]] = []
        while True:
            width = growth.num_children
            children = self._chooser.choose(
                *self._ssm.likeliest(hidden, self._chooser.num_candidates(width, rows)),
                width,
                rows,
            )
            if children.draws is not None:
                drawn.append((requests, nodes, children.draws))
            frontier = growth.extend(children.scores, children.tokens)
            if frontier is None:
                break
            hidden = self._ssm.run_level(frontier, slots, num_tokens)
            requests, nodes = frontier.requests, frontier.nodes
            rows = roots.below(requests, frontier.depth, nodes)
        trees = growth.finish()
        draws: list[dict[int, Draws]] = [{} for _ in slots]
        for requests, nodes, level in drawn:
            places = trees.places[requests, nodes]
            for f in range(len(nodes)):
                at = ROOT if nodes[f] == ROOT else int(places[f])
                draws[requests[f]][at] = level.row(f)
        return trees, draws
