"""The commit on a GPU: one launch for all layers of a KV cache group."""

from collections.abc import Sequence

import torch
from torch import nn

from vllm_specinfer.kernels.triton.commit import LayerTable, commit_paths


class CUDACommit:
    """`CommitWalks` by the Triton kernel; layers keep their caches where they are."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Describe the layers' caches, which must be allocated."""
        self._table = LayerTable.of([layer.kv_cache for layer in layers])

    def __call__(
        self,
        slot_mapping: torch.Tensor,
        first: torch.Tensor,
        path: torch.Tensor,
        count: torch.Tensor,
    ) -> None:
        """As `CommitWalks` says."""
        commit_paths(self._table, slot_mapping, first, path, count)
