"""Asynchronous scheduling: a step is scheduled while the one before it runs.

How many nodes the next trees have nobody knows then, and not where the texts will end.
The scheduler gives every request rows for all N nodes behind a text of which all nodes
were accepted; the worker runs the rows that there are (`TreeWorker.execute_model`).
Where it waits for the walks of the step before to draft, only the host's part of a step
is hidden: scheduling, and what becomes of the tokens. Where it drafts ahead
(`drafting/ahead_steps.py`), that is hidden, too.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_specinfer.scheduling.draft_trees import DraftTrees
from vllm_specinfer.scheduling.scheduler import PLACEHOLDER_TOKEN, SpecInferScheduler
from vllm_specinfer.tree.token_tree import TokenTree


class AsyncSpecInferScheduler(SpecInferScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As `SpecInferScheduler`; what no grammar can follow in time is left out.

        vLLM waits for the trees of a request with a grammar where it waits for its
        tokens; where it knows these, as after a pause, it does not.
        """
        self._trees.clear()
        for request in self.running:
            if request.use_structured_output and not request.num_output_placeholders:
                request.spec_token_ids = []
        return super().schedule(*args, **kwargs)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTrees, scheduler_output: SchedulerOutput
    ) -> None:
        """Take the trees of a step that runs; its grammars are still to be asked."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for req_id, tokens, parents in draft_token_ids.each():
            if PLACEHOLDER_TOKEN not in tokens:
                count = len(drafts.get(req_id, ()))
                self._trees[req_id] = TokenTree.of(tokens[:count], parents[:count])

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As `SpecInferScheduler`; rows without a node are nobody's drafts."""
        worker = getattr(model_runner_output, "tree_stats", None)
        if worker is not None:
            # vLLM takes them off what it reports of a request.
            scheduler_output.num_invalid_spec_tokens = {
                req_id: len(drafts) - worker.num_nodes.get(req_id, 0)
                for req_id, drafts in (
                    scheduler_output.scheduled_spec_decode_tokens.items()
                )
            }
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        *,
        request_id: str,
        **counts: Any,
    ) -> SpecDecodingStats | None:
        """As `SpecInferScheduler`, of the nodes that there were."""
        counts["num_draft_tokens"] = self._worker.num_nodes.get(request_id, 0)
        counts["num_invalid_spec_tokens"] = None
        return super().make_spec_decoding_stats(
            spec_decoding_stats, request_id=request_id, **counts
        )

    def _scheduled_tree(self, req_id: str, drafts: list[int]) -> TokenTree:
        """The tree of a request; the worker runs no rows that hang on nothing."""
        return self._trees.get(req_id, TokenTree.of([], []))


def specinfer_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> SpecInferScheduler:
    """The scheduler of an engine; vLLM calls it as if it were a class."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    scheduler = AsyncSpecInferScheduler if asynchronous else SpecInferScheduler
    return scheduler(vllm_config=vllm_config, **kwargs)
