"""vLLM's CPU attention backend with tree rows.

Requests without a tree run on vLLM's kernel; the rows of trees run on ours, in one
pass over the paged cache.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
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

from vllm_specinfer.attention.metadata import TreeRows
from vllm_specinfer.commit.compaction import CPUCommit
from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.kernels.cpu.tree_attention import tree_attention


@dataclass
class TreeAttentionMetadata(CPUAttentionMetadata):
    """vLLM's metadata plus the step's trees, None in a step without any."""

    tree: TreeRows | None = None


class CPUTreeAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds `TreeAttentionMetadata`."""

    # `build` has the argument `tree`.
    takes_trees = True

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
            vLLM's metadata where `tree` is None.
        """
        if tree is not None and tree.all_tree:
            return self.build_level(common_attn_metadata, tree)
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if tree is None:
            return stock
        values = {f.name: getattr(stock, f.name) for f in fields(stock)}
        return TreeAttentionMetadata(**values, tree=tree)

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


class CPUTreeAttentionImpl(CPUAttentionBackendImpl):
    """Runs tree rows through `tree_attention`, everything else through vLLM.

    Layers that cannot run trees are refused when the models are loaded
    (`refusals.layer_reason`).
    """

    # How the layers' caches are committed.
    commit_paths_of = CPUCommit

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Built while the model is, so that no step waits for a compiler.
        extension.load()
        self._float_sinks: torch.Tensor | None = None

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As in vLLM (vllm/v1/attention/backends/cpu_attn.py).

        Args:
            layer: The attention layer.
            query: [T, H, D].
            key: [T, Hkv, D].
            value: [T, Hkv, D].
            kv_cache: [B, Hkv, block_size, 2 * D].
            attn_metadata: With or without trees.
            output: [T, H * D] or [T, H, D], written.
            output_scale: Not supported by the CPU backend.
            output_block_scale: Not supported by the CPU backend.

        Returns:
            `output`.
        """
        tree = getattr(attn_metadata, "tree", None)
        if tree is None or not tree.all_tree:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
            if tree is None:
                return output
        if self.sinks is not None and self._float_sinks is None:
            self._float_sinks = self.sinks.float().contiguous()
        num_tokens = attn_metadata.num_actual_tokens
        query = query[:num_tokens]
        tree_attention(
            query,
            kv_cache,
            output[:num_tokens].view(query.shape),
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            tree,
            self.scale,
            self.logits_soft_cap,
            self._float_sinks,
            layer.isa,
        )
        return output


class CPUTreeAttentionBackend(CPUAttentionBackend):
    """Stands in for CPU_ATTN; its name must stay that of the enum member."""

    @staticmethod
    def get_impl_cls() -> type[CPUTreeAttentionImpl]:
        """The implementation."""
        return CPUTreeAttentionImpl

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
