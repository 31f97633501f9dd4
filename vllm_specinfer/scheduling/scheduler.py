"""Scheduler subclasses: requests that cannot speculate exactly get no drafts."""

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from vllm_specinfer.verify.eligibility import no_speculation_reason


class SpecInferScheduler(Scheduler):
    """vLLM's synchronous scheduler, with drafts for eligible requests only."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Accept the worker's drafts (vllm/v1/core/sched/scheduler.py)."""
        super().update_draft_token_ids(draft_token_ids)
        for req_id in draft_token_ids.req_ids:
            request = self.requests.get(req_id)
            if request is not None and no_speculation_reason(request.sampling_params):
                request.spec_token_ids = []
