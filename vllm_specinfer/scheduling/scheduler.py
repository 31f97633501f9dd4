"""The scheduler subclass: requests that cannot speculate exactly get no drafts."""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from vllm_specinfer.hooks import cpu_v2
from vllm_specinfer.verify.eligibility import no_speculation_reason


class SpecInferScheduler(Scheduler):
    """vLLM's synchronous scheduler, with drafts for eligible requests only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An engine core in its own process validates the config once more when it is
        # up; the scheduler is the first of our objects to live there.
        if current_platform.is_cpu():
            cpu_v2.enable_in_frontend()
        super().__init__(*args, **kwargs)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Accept the worker's drafts (vllm/v1/core/sched/scheduler.py)."""
        super().update_draft_token_ids(draft_token_ids)
        for req_id in draft_token_ids.req_ids:
            request = self.requests.get(req_id)
            if request is not None and no_speculation_reason(request.sampling_params):
                request.spec_token_ids = []
