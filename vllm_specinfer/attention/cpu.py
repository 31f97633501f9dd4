"""vLLM's CPU attention backend with tree rows.

The rows of trees run on our kernel, in one pass over the paged cache, and so do the
few rows of requests without a tree, which are chains. Prompts have more. The runner
puts them last, and vLLM's kernel runs the requests from the first of them on.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.v1.attention import selector
from vllm.v1.attention.backend import (
    AttentionLayer,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import (
    AttentionBackendEnum,
    register_backend,
)

from vllm_specinfer.attention.mixed import MixedAttentionImpl, from_request
from vllm_specinfer.commit.compaction import CPUCommit
from vllm_specinfer.config import SpecInferConfig
from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.kernels.cpu.cache_write import write_kv
from vllm_specinfer.kernels.cpu.page_layout import page_layout
from vllm_specinfer.kernels.cpu.tree_attention import tree_attention
from vllm_specinfer.tree.rows import TreeRows
from vllm_specinfer.tree.token_tree import chain_bits, num_words

# Rows of a request up to which our kernel has been measured not to be slower than
# vLLM's (benchmarks/cpu_attention.py).
MAX_CHAIN = 32


@dataclass
class TreeAttentionMetadata(CPUAttentionMetadata):
    """vLLM's metadata plus what runs on which kernel.

    Attributes:
        tree: The rows that run on our kernel.
        prompts: vLLM's metadata of the step's last requests, None for none of them.
        first_prompt_row: Where their rows begin.
    """

    tree: TreeRows | None = None
    prompts: CPUAttentionMetadata | None = None
    first_prompt_row: int = 0


class CPUTreeAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds `TreeAttentionMetadata`."""

    # `build` has the argument `tree`.
    takes_trees = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._runs_chains = _drafts_trees(self.vllm_config) and self._has_kernel()

    def _has_kernel(self) -> bool:
        """Of our own, for caches like these."""
        layout = page_layout(
            self.isa, self.kv_cache_spec.dtype, self.block_size, self.head_dim
        )
        return layout.is_known and extension.load() is not None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree: TreeRows | None = None,
    ) -> CPUAttentionMetadata:
        """Metadata for one pass.

        Args:
            common_prefix_len: As in vLLM.
            common_attn_metadata: As in vLLM.
            fast_build: As in vLLM.
            tree: The step's trees, from `ModelSpecificAttnMetadata`.

        Returns:
            vLLM's metadata where nothing is to run on our kernel.
        """
        if self._runs_chains:
            tree = _with_chains(common_attn_metadata, tree)
        if tree is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = self.build_level(common_attn_metadata, tree)
        if not tree.all_tree:
            # The first request that is not ours.
            first = int(tree.is_tree.byte().argmin())
            prompts, row = from_request(common_attn_metadata, first)
            metadata.prompts = super().build(0, prompts, fast_build)
            metadata.first_prompt_row = row
        return metadata

    def build_level(
        self, common: CommonAttentionMetadata, tree: TreeRows
    ) -> TreeAttentionMetadata:
        """Metadata for a pass over trees alone, such as a level of growing ones."""
        return TreeAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,  # only vLLM's kernel reads it
            tree=tree,
        )


def _drafts_trees(config: VllmConfig | None) -> bool:
    """No, of a plain engine that starts in a process where there was one with trees."""
    return config is None or isinstance(config.speculative_config, SpecInferConfig)


def _with_chains(
    common: CommonAttentionMetadata, tree: TreeRows | None
) -> TreeRows | None:
    """The step's trees and, as chains, its other requests that are short."""
    if tree is not None and tree.all_tree:
        return tree
    starts = common.query_start_loc.numpy()
    counts = np.diff(starts)
    if tree is None:
        is_tree = np.zeros(len(counts), bool)
        bits = np.zeros((common.num_actual_tokens, num_words(MAX_CHAIN)), np.int64)
        context_lens = np.zeros(len(counts), np.int32)
    else:
        is_tree, bits = tree.is_tree.numpy(), tree.ancestor_bits.numpy()
        context_lens = tree.context_lens.numpy()
    is_chain = (counts <= MAX_CHAIN) & ~is_tree
    if not is_chain.any():
        return tree
    # Row i of a chain sees the rows up to itself.
    row = (np.arange(starts[-1]) - np.repeat(starts[:-1], counts)) % MAX_CHAIN
    chains = chain_bits(MAX_CHAIN, bits.shape[1])[row]
    of_chain = np.repeat(is_chain, counts)[:, None]
    computed = common.seq_lens.numpy() - counts
    ours = is_tree | is_chain
    return TreeRows(
        is_tree=torch.from_numpy(ours),
        context_lens=torch.from_numpy(np.where(is_chain, computed, context_lens)),
        ancestor_bits=torch.from_numpy(np.where(of_chain, chains, bits)),
        all_tree=bool(ours.all()),
    )


class CPUTreeAttentionImpl(MixedAttentionImpl, CPUAttentionBackendImpl):
    """Runs trees and chains through `tree_attention`, everything else through vLLM.

    Layers that cannot run trees are refused when the models are loaded
    (`model_refusals.layer_reason`).
    """

    # How the layers' caches are committed.
    commit_paths_of = CPUCommit

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Built while the model is, so that no step waits for a compiler.
        extension.load()

    def typed(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The cache as what it holds: vLLM has fp8 as bytes."""
        if not self.is_fp8_kv_cache:
            return kv_cache
        is_e5m2 = self.kv_cache_dtype == "fp8_e5m2"
        return kv_cache.view(torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn)

    def attend_trees(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        metadata: TreeAttentionMetadata,
    ) -> None:
        """As in `MixedAttentionImpl`."""
        tree_attention(
            query,
            self.typed(kv_cache),
            out,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.tree,
            self.scale,
            self.logits_soft_cap,
            self.sinks,
            layer.isa,
            layer._k_scale_float,
            layer._v_scale_float,
            max(self.sliding_window, 0),
        )

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """As in vLLM; the few rows of a step of trees are written by our kernel."""
        if not write_kv(key, value, kv_cache, slot_mapping, layer.isa):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class CPUTreeAttentionBackend(CPUAttentionBackend):
    """Stands in for CPU_ATTN; its name must stay that of the enum member."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The implementation."""
        trees = _drafts_trees(get_current_vllm_config_or_none())
        return CPUTreeAttentionImpl if trees else CPUAttentionBackendImpl

    @staticmethod
    def get_builder_cls() -> type[CPUTreeAttentionMetadataBuilder]:
        """The metadata builder."""
        return CPUTreeAttentionMetadataBuilder


def register() -> None:
    """Make every attention layer built from now on able to run trees.

    The CPU platform offers no other choice than CPU_ATTN, so that name is overridden.
    May be called again.
    """
    register_backend(
        AttentionBackendEnum.CPU_ATTN,
        f"{CPUTreeAttentionBackend.__module__}.{CPUTreeAttentionBackend.__qualname__}",
    )
    # An engine that ran in this process before has left its choice there.
    selector._cached_get_attn_backend.cache_clear()
