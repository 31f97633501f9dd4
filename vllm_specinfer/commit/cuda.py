"""The commit on a GPU: one launch for all layers of a KV cache group."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from vllm_specinfer.device import stage
from vllm_specinfer.kernels.triton.commit import LayerTable, commit_paths


class CUDACommit:
    """`CommitPaths` by the Triton kernel; layers keep their caches where they are."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Describe the layers' caches, which must be allocated."""
        self._table = LayerTable.of([layer.kv_cache for layer in layers])

    def __call__(
        self,
        slot_mapping: torch.Tensor,
        roots: Sequence[int],
        paths: Sequence[Sequence[int]],
    ) -> None:
        """As `CommitPaths` says."""
        counts = np.array([len(path) for path in paths], np.int32)
        padded = np.zeros((len(paths), counts.max(initial=0)), np.int32)
        for row, path in zip(padded, paths, strict=True):
            row[: len(path)] = path
        firsts = np.array(roots, np.int64)
        staged = stage(slot_mapping.device, firsts, padded, counts)
        commit_paths(self._table, slot_mapping, *staged)
