"""What drafting must know about each request slot."""

import numpy as np
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_specinfer.drafting.children import DraftRows
from vllm_specinfer.tree.token_tree import ROOT


class DraftRequests:
    """Rows per request slot.

    Attributes:
        num_caught_up: [S] int64, tokens whose SSM K/V is valid.
        sampling: vLLM's sampling parameters of the slots, once there is a sampler.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self.num_caught_up = np.zeros(max_num_reqs, np.int64)
        self.sampling: SamplingStates | None = None

    def add(self, slot: int, request: NewRequestData) -> None:
        """Start a request; cached blocks hold the SSM's K/V beside the target's."""
        self.num_caught_up[slot] = request.num_computed_tokens

    def draft_rows(self, slots: np.ndarray, roots: np.ndarray) -> DraftRows:
        """The roots of trees, [R] slots and positions."""
        sampling = self.sampling
        return DraftRows(
            seeds=sampling.seeds.np[slots],
            roots=roots,
            depths=np.zeros(len(slots), np.int64),
            nodes=np.full(len(slots), ROOT),
            temperatures=sampling.temperature.np[slots],
            top_k=sampling.top_k.np[slots],
            top_p=sampling.top_p.np[slots],
            min_p=sampling.min_p.np[slots],
        )
