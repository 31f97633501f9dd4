"""Steps of trees and prompts: a step's last requests run on vLLM's kernel.

The runner puts requests with drafts first, then the others by their rows
(vllm/v1/worker/gpu/model_runner.py: sort_batch_req_ids). From the first one on that has
too many rows for our kernels, vLLM's runs all of them; what is ours among them, which
is rare, is run again by ours.
"""

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata


def from_request(
    common: CommonAttentionMetadata, first: int
) -> tuple[CommonAttentionMetadata, int]:
    """A step's requests from this one on, as if there were no others.

    Args:
        common: Of the step.
        first: The request.

    Returns:
        Theirs, and the first of their rows.
    """
    row = int(common.query_start_loc_cpu[first])
    prompts = replace(
        common,
        query_start_loc=common.query_start_loc[first:] - row,
        query_start_loc_cpu=common.query_start_loc_cpu[first:] - row,
        # Triton compiles kernels anew for addresses that are not aligned as others are.
        seq_lens=common.seq_lens[first:].clone(),
        num_reqs=common.num_reqs - first,
        num_actual_tokens=common.num_actual_tokens - row,
        block_table_tensor=common.block_table_tensor[first:].clone(),
        slot_mapping=common.slot_mapping[row:],
    )
    return prompts, row


class MixedAttentionImpl:
    """Before an implementation of vLLM's: runs on it what is not ours.

    Metadata has `tree`, the rows that run on our kernel, None in a step without any;
    `prompts`, vLLM's metadata of the step's last requests, None for none of them; and
    `first_prompt_row`, where their rows begin.
    """

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As in vLLM (vllm/v1/attention/backend.py: AttentionImpl).

        Args:
            layer: The attention layer, with the scales of a quantized cache.
            query: [T, H, D].
            key: [T, Hkv, D].
            value: [T, Hkv, D].
            kv_cache: [B, Hkv, block_size, 2 * D].
            attn_metadata: With or without trees.
            output: [T, H * D] or [T, H, D], written.
            output_scale: Not supported.
            output_block_scale: Not supported.

        Returns:
            `output`.
        """
        tree = getattr(attn_metadata, "tree", None)
        stock, first_row = attn_metadata, 0
        if tree is not None:
            stock, first_row = attn_metadata.prompts, attn_metadata.first_prompt_row
        if tree is None or stock is not None:
            super().forward(
                layer,
                query[first_row:],
                # Layers that share another's K/V have none of their own.
                None if key is None else key[first_row:],
                None if value is None else value[first_row:],
                kv_cache,
                stock,
                output[first_row:],
                output_scale,
                output_block_scale,
            )
        if tree is None:
            return output
        # Views cost as much as some rows do, in every layer.
        out = output if output.dim() == 3 else output.view(query.shape)
        if (num_tokens := attn_metadata.num_actual_tokens) < len(query):
            query, out = query[:num_tokens], out[:num_tokens]
        self.attend_trees(layer, query, kv_cache, out, attn_metadata)
        return output

    def attend_trees(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        metadata: Any,
    ) -> None:
        """Attend the rows that are ours.

        Args:
            layer: The attention layer, with the scales of a quantized cache.
            query: [T, H, D].
            kv_cache: [B, Hkv, block_size, 2 * D].
            out: [T, H, D], written.
            metadata: With trees.
        """
        raise NotImplementedError
