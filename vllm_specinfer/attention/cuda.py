"""vLLM's Triton attention backend with tree rows.

Steps without a tree run on vLLM's kernel. In others requests with as few rows as a tree
may have run on ours, trees and causal rows in one launch, and prompts on vLLM's; so do
captured graphs, which find the trees of a step in buffers that the builder fills.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionLayer,
    AttentionType,
    CommonAttentionMetadata,
    max_decode_query_len,
)
from vllm.v1.attention.backends.registry import (
    AttentionBackendEnum,
    register_backend,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_specinfer.attention.mixed import MixedAttentionImpl, from_request
from vllm_specinfer.kernels.triton.commit import LayerTable, commit_paths
from vllm_specinfer.kernels.triton.row_blocks import RowBlocks, max_row_blocks
from vllm_specinfer.kernels.triton.tiles import rows_per_block
from vllm_specinfer.kernels.triton.tree_attention import tree_attention
from vllm_specinfer.refusals import FP8_KV_DTYPES, PLAIN_KV_DTYPES
from vllm_specinfer.tree.rows import TreeRows, WritesTreeRows
from vllm_specinfer.tree.token_tree import WORD_BITS, num_words


@dataclass
class TreeAttentionMetadata(TritonAttentionMetadata):
    """vLLM's metadata plus the step's trees, None in a step without any.

    Attributes:
        tree: The step's trees.
        prompts: vLLM's metadata of the step's last requests, None for none of them.
        first_prompt_row: Where their rows begin.
        row_blocks: What the programs of our kernel attend.
        tile_rows: Rows of a request that its tiles are made for.
    """

    tree: TreeRows | None = None
    prompts: TritonAttentionMetadata | None = None
    first_prompt_row: int = 0
    row_blocks: RowBlocks | None = None
    tile_rows: int = 0


class CUDATreeAttentionMetadataBuilder(TritonAttentionMetadataBuilder):
    """Builds `TreeAttentionMetadata` over buffers that outlive the step."""

    # `build` has the argument `tree`.
    takes_trees = True
    # Our kernel runs causal rows in steps with prompts, too.
    _runs_chains: ClassVar[bool] = True
    # Prefills run on vLLM's kernel, so a graph holds verification or decoding only.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler = vllm_config.scheduler_config
        max_num_reqs, max_num_rows = (
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
        )
        self._tree_rows = max_decode_query_len(vllm_config)
        words = num_words(self._tree_rows)
        int32 = {"dtype": torch.int32, "device": device}
        self._trees = TreeRows(
            is_tree=torch.zeros(max_num_reqs, dtype=torch.bool, device=device),
            context_lens=torch.zeros(max_num_reqs, **int32),
            ancestor_bits=torch.zeros(
                max_num_rows, words, dtype=torch.int64, device=device
            ),
        )
        self._all = torch.ones_like(self._trees.is_tree)
        self._holds_trees = self._captured = False
        self._row_blocks = RowBlocks.room(max_num_rows, device)

    def _tile_rows(self, stock: TritonAttentionMetadata) -> int:
        """Rows that a request may have at a graph's capture and in all of its steps."""
        if not self._captured:  # else steps would compile what no capture has
            return self._tree_rows
        return min(self._tree_rows, stock.num_actual_tokens)

    def _rows_per_block(self, tile_rows: int) -> int:
        dtype = self.vllm_config.model_config.dtype
        spec = self.kv_cache_spec  # of these layers; others may have other heads
        group = self.num_heads_q // spec.num_kv_heads
        return rows_per_block(tile_rows, group, spec.head_size, dtype.itemsize)

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> int:
        """Requests of a graph may have any number of rows up to a whole tree's."""
        return max_decode_query_len(vllm_config)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree: WritesTreeRows | None = None,
    ) -> TritonAttentionMetadata:
        """Metadata for one pass; writes the trees to where graphs read them.

        Args:
            common_prefix_len: As in vLLM.
            common_attn_metadata: As in vLLM.
            fast_build: As in vLLM.
            tree: The step's trees, from `ModelSpecificAttnMetadata`; on any device.

        Returns:
            vLLM's metadata where `tree` is None.

        Raises:
            ValueError: The trees' bit rows have another number of words than the
                buffers, which follow `num_speculative_tokens`.
        """
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if tree is None:
            if self._holds_trees:
                self._trees.is_tree.zero_()
                self._holds_trees = False
            if self._captured:
                self._lay_out(stock)
            return stock
        tree.write_to(self._trees)
        self._holds_trees = True
        if stock.max_query_len <= _most_rows(self._trees):
            return self._in_verification(stock)
        first = 0
        if self._runs_chains:
            counts = common_attn_metadata.query_start_loc_cpu.diff()
            first = int((counts > _most_rows(self._trees)).byte().argmax())
        metadata = self._in_verification(stock, first)
        prompts, row = from_request(common_attn_metadata, first)
        metadata.prompts = super().build(0, prompts, fast_build)
        metadata.first_prompt_row = row
        return metadata

    def build_level(
        self, common: CommonAttentionMetadata, tree: TreeRows
    ) -> TreeAttentionMetadata:
        """Metadata for a pass over trees alone, such as a level of growing ones.

        Args:
            common: As in vLLM.
            tree: The trees, on the device; no graph reads them, so they stay there. No
                request has more rows than these have bits.
        """
        stock, rows = super().build(0, common), common.max_query_len
        per_request = -(-rows // self._rows_per_block(rows))
        blocks = RowBlocks.uniform(common.num_reqs, per_request, self.device)
        return self._with_trees(stock, tree, blocks, rows)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonAttentionMetadata:
        """Metadata of a graph that runs on our kernel, whether a step has trees or not.

        Args:
            common_attn_metadata: As in vLLM.

        Returns:
            vLLM's metadata where requests may have more rows than a tree.
        """
        stock = super().build_for_cudagraph_capture(common_attn_metadata)
        if stock.max_query_len > _most_rows(self._trees):
            return stock
        self._captured = True
        return self._in_verification(stock)

    def _in_verification(
        self, stock: TritonAttentionMetadata, first: int | None = None
    ) -> TreeAttentionMetadata:
        blocks = self._lay_out(stock, first)
        return self._with_trees(stock, self._trees, blocks, self._tile_rows(stock))

    def _lay_out(
        self, stock: TritonAttentionMetadata, first: int | None = None
    ) -> RowBlocks:
        """Which rows the programs of a step attend.

        Args:
            stock: Of the step.
            first: The first request of which they attend trees alone; None for none.
        """
        starts = stock.query_start_loc
        num_reqs = len(starts) - 1
        attended = self._all
        if first is not None:
            attended = self._trees.is_tree.clone()
            attended[:first] = True
        rows = self._rows_per_block(self._tile_rows(stock))
        self._row_blocks.fill(starts, rows, attended)
        most = max_row_blocks(stock.num_actual_tokens, num_reqs, rows)
        return self._row_blocks.first(most)

    def _with_trees(
        self,
        stock: TritonAttentionMetadata,
        tree: TreeRows,
        row_blocks: RowBlocks,
        tile_rows: int,
    ) -> TreeAttentionMetadata:
        values = {f.name: getattr(stock, f.name) for f in fields(stock)}
        return TreeAttentionMetadata(
            **values,
            tree=tree,
            row_blocks=row_blocks,
            tile_rows=tile_rows,
        )


def _most_rows(tree: TreeRows) -> int:
    """Rows that a request may have for our kernel to run them."""
    return tree.ancestor_bits.shape[1] * WORD_BITS


class CUDATreeAttentionImpl(MixedAttentionImpl, TritonAttentionImpl):
    """Runs trees and chains through `tree_attention`, prefills through vLLM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.alibi_slopes is not None or self.chunk_lookback > -1:
            raise ValueError(
                "attention layers must have neither ALiBi nor chunks for tree "
                f"attention; got slopes {self.alibi_slopes} and a lookback of "
                f"{self.chunk_lookback} chunks"
            )
        # Our kernel takes queries and gives outputs of the model's type.
        self.supports_quant_query_input = False

    @staticmethod
    def commit_paths_of(layers: Sequence[nn.Module]) -> Callable[..., None]:
        """Commits these layers by one launch; their caches stay where they are."""
        table = LayerTable.of([layer.kv_cache for layer in layers])
        return functools.partial(commit_paths, table)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Outputs are not quantized."""
        return False

    def attend_trees(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        metadata: TreeAttentionMetadata,
    ) -> None:
        """As in `MixedAttentionImpl`."""
        scales = {}
        if self.kv_cache_dtype.startswith("fp8"):
            kv_cache = kv_cache.view(self.fp8_dtype)
            scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        tree_attention(
            query,
            kv_cache,
            out,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.tree,
            self.scale,
            self.logits_soft_cap,
            self.sinks,
            max_query_len=metadata.tile_rows,
            window=self.sliding_window[0] + 1,
            row_blocks=metadata.row_blocks,
            **scales,
        )


_no = classmethod(lambda cls: False)


class CUDATreeAttentionBackend(TritonAttentionBackend):
    """Registered as CUSTOM, which must also be its name."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        *PLAIN_KV_DTYPES,
        *FP8_KV_DTYPES,
    ]

    @staticmethod
    def get_name() -> str:
        """The name of the enum member."""
        return AttentionBackendEnum.CUSTOM.name

    @staticmethod
    def get_impl_cls() -> type[CUDATreeAttentionImpl]:
        """The implementation."""
        return CUDATreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CUDATreeAttentionMetadataBuilder]:
        """The metadata builder."""
        return CUDATreeAttentionMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Any size, as it is padded to a power of two, up to 256."""
        return 32 <= head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Ampere and later: tiles do not fit into Turing's 64 KiB of shared memory."""
        return capability >= DeviceCapability(8, 0)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders only."""
        return attn_type == AttentionType.DECODER

    supports_non_causal = _no  # rows without a tree are causal
    supports_mm_prefix = _no  # no bidirectional ranges
    supports_rswa = _no  # no reference sliding window
    supports_alibi_sqrt = _no  # no ALiBi
    supports_batch_invariance = _no  # splits of the KV positions follow the batch
    # The rows' bits lie where the host expects the rows.
    supports_device_cpu_query_lens_mismatch = _no


def register(backend: type[TritonAttentionBackend] = CUDATreeAttentionBackend) -> None:
    """Make attention layers able to run trees where the backend is CUSTOM.

    That choice is `attention_config.backend`. May be called again.
    """
    register_backend(
        AttentionBackendEnum.CUSTOM, f"{backend.__module__}.{backend.__qualname__}"
    )
    # An engine that ran in this process before has left its choice there.
    selector._cached_get_attn_backend.cache_clear()
