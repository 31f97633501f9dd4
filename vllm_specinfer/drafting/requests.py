"""What drafting must know about each request slot."""

import numpy as np
from vllm.v1.core.sched.output import NewRequestData

from vllm_specinfer.verify.eligibility import no_speculation_reason


class DraftRequests:
    """Rows per request slot.

    Attributes:
        speculates: [S] bool, the request's sampling can be verified exactly.
        num_caught_up: [S] int64, tokens whose SSM K/V is valid.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self.speculates = np.zeros(max_num_reqs, bool)
        self.num_caught_up = np.zeros(max_num_reqs, np.int64)

    def add(self, slot: int, request: NewRequestData) -> None:
        """Start a request; cached blocks hold the SSM's K/V beside the target's."""
        self.speculates[slot] = no_speculation_reason(request.sampling_params) is None
        self.num_caught_up[slot] = request.num_computed_tokens
