"""The scheduler subclass, which lives where no other object of ours does."""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_specinfer.hooks import cpu_v2


class SpecInferScheduler(Scheduler):
    """vLLM's synchronous scheduler.

    How many drafts each request has comes from the worker (`take_draft_token_ids`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An engine core in its own process validates the config once more when it is
        # up; the scheduler is the first of our objects to live there.
        if current_platform.is_cpu():
            cpu_v2.enable_in_frontend()
        super().__init__(*args, **kwargs)
