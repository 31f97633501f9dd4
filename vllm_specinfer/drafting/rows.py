"""The sampling parameters that drafting follows."""

import numpy as np
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_specinfer.drafting.children import DraftRows
from vllm_specinfer.tree.token_tree import ROOT


def root_rows(
    sampling: SamplingStates, slots: np.ndarray, positions: np.ndarray
) -> DraftRows:
    """The roots of trees.

    Args:
        sampling: vLLM's sampling parameters of all slots.
        slots: [R] request slots.
        positions: [R] of the roots.
    """
    return DraftRows(
        seeds=sampling.seeds.np[slots],
        roots=positions,
        depths=np.zeros(len(slots), np.int64),
        nodes=np.full(len(slots), ROOT),
        temperatures=sampling.temperature.np[slots],
        top_k=sampling.top_k.np[slots],
        top_p=sampling.top_p.np[slots],
        min_p=sampling.min_p.np[slots],
    )
