"""A custom logits processor that reads the tokens before each row."""

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsContext,
    LogitsProcessor,
)


class TwoBack(LogitsProcessor):
    """Favours tokens by the sum of the two tokens before, where a request asks for it.

    Drafted tokens stand in the rows before a row, committed ones in the request.
    """

    def __init__(self, vllm_config, req_states) -> None:
        self._tokens = req_states.all_token_ids
        self._strength = torch.zeros(req_states.max_num_reqs)

    def add_request(self, req_idx, sampling_params) -> bool:
        args = sampling_params.extra_args or {}
        self._strength[req_idx] = args.get("two_back", 0.0)
        return bool(self._strength[req_idx])

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        # Each request is there once, as vLLM says.
        slots = ctx.idx_mapping.tolist()
        assert slots == ctx.idx_mapping_np.tolist() and len(set(slots)) == len(slots)
        assert len(ctx.seq_lens_upper_bound_np) == len(slots)
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            if not (strength := self._strength[slot]):
                continue
            if int(ctx.expanded_local_pos[row]) > 0:
                before = ctx.input_ids[row - 1]
            else:
                before = self._tokens.gpu[slot, ctx.pos[row] - 1]
            total = int(before + ctx.input_ids[row])
            logits[row, total % 7 :: 7] += strength
        return logits
