"""The CUDA backend with xFormers' tree attention in the place of our kernel.

Chosen by `"tree_attention": "xformers"`. Prefills, K/V writes and commits stay as they
are. Never run on a GPU.
"""

from typing import Any, ClassVar

import torch
from vllm.config.cache import CacheDType
from vllm.v1.attention.backend import AttentionCGSupport, AttentionLayer

from vllm_specinfer.attention.cuda import (
    CUDATreeAttentionBackend,
    CUDATreeAttentionImpl,
    CUDATreeAttentionMetadataBuilder,
    TreeAttentionMetadata,
)
from vllm_specinfer.kernels.xformers import tree_attention
from vllm_specinfer.refusals import PLAIN_KV_DTYPES


class XformersMetadataBuilder(CUDATreeAttentionMetadataBuilder):
    """As the Triton kernel's."""

    _runs_chains: ClassVar[bool] = False
    # Lengths and trees are read on the host.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class XformersImpl(CUDATreeAttentionImpl):
    """Runs tree rows through xFormers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.logits_soft_cap or self.sliding_window != (-1, -1):
            raise ValueError(
                "tree_attention must be auto for layers with a softcap or a sliding "
                f"window; got {self.logits_soft_cap} and {self.sliding_window}"
            )

    def attend_trees(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        metadata: TreeAttentionMetadata,
    ) -> None:
        """As in `CUDATreeAttentionImpl`."""
        tree_attention(
            query,
            kv_cache,
            out,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.tree,
            self.scale,
            chains=metadata.prompts is None,
        )


class XformersBackend(CUDATreeAttentionBackend):
    """What xFormers' split-K kernel takes (xformers/ops/fmha/triton_splitk.py)."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [*PLAIN_KV_DTYPES]

    @staticmethod
    def get_impl_cls() -> type[XformersImpl]:
        """The implementation."""
        return XformersImpl

    @staticmethod
    def get_builder_cls() -> type[XformersMetadataBuilder]:
        """The metadata builder."""
        return XformersMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Powers of two."""
        return head_size in (32, 64, 128, 256)

    @classmethod
    def supports_sink(cls) -> bool:
        """No sinks."""
        return False
