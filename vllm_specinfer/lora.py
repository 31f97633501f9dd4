"""LoRA adapters of the target where a request has more than one row of logits."""

from collections.abc import Callable

import numpy as np
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState


class TreeLoraState(LoraState):
    """Gives every row of logits its request's adapter.

    vLLM's state names one adapter per request, for the layer that makes logits; a tree
    has logits at every node.
    """

    def __init__(self, max_num_reqs: int, num_logits: Callable[[], np.ndarray]) -> None:
        """`num_logits` returns the rows of logits per request of the step."""
        super().__init__(max_num_reqs)
        self._num_logits = num_logits

    def make_lora_inputs(
        self,
        req_ids: list[str],
        idx_mapping: np.ndarray,
        num_scheduled_tokens: np.ndarray,
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        """The adapters of all rows of logits, of all tokens, and the adapters."""
        of_requests, of_tokens, adapters = super().make_lora_inputs(
            req_ids, idx_mapping, num_scheduled_tokens
        )
        of_logits = np.repeat(of_requests, self._num_logits())
        return tuple(of_logits.tolist()), of_tokens, adapters
