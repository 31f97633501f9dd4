"""The scheduler subclass: grammars along trees, blocks of trees, and metrics."""

from collections import Counter
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_specinfer.flags import DEBUG_ENV, is_on
from vllm_specinfer.hooks import cpu_v2
from vllm_specinfer.options import TESTS_DRAWS
from vllm_specinfer.scheduling import invariants
from vllm_specinfer.scheduling.blocks import LEAST_LOOKAHEAD, SlotsOfTrees
from vllm_specinfer.scheduling.draft_trees import DraftTrees
from vllm_specinfer.scheduling.grammar import bitmask_of_trees, goes_on_behind_its_end
from vllm_specinfer.scheduling.step_stats import (
    NO_ROOM,
    PREFILL,
    RETURNED_BLOCKS,
    SCHEDULE,
    SHORT_STEPS,
    StepStats,
    WorkerStats,
)
from vllm_specinfer.tree.token_tree import NO_NODE, TokenTree

# vLLM's stand-in for drafts that the worker keeps to itself.
PLACEHOLDER_TOKEN = -1


class SpecInferScheduler(Scheduler):
    """vLLM's synchronous scheduler; `async_scheduler.py` has the other one.

    How many drafts each request has comes from the worker (`take_draft_token_ids`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An engine core in its own process validates the config once more when it is
        # up; the scheduler is the first of our objects to live there.
        if current_platform.is_cpu():
            cpu_v2.enable_in_frontend()
        super().__init__(*args, **kwargs)
        # What the worker says, and what it is: it knows how many nodes, not why.
        self._reasons: dict[str, str] = {}
        options = self.vllm_config.speculative_config.options
        self._tests_draws = options.verification_rule in TESTS_DRAWS
        schedule = options.batch_schedule
        if self.dynamic_sd_lookup is None and schedule is not None:
            # vLLM drops it under data parallelism, whose ranks must take equal steps;
            # those of dense models need not.
            self.dynamic_sd_lookup = build_dynamic_sd_schedule_lookup(
                *(schedule, self.scheduler_config.max_num_seqs, self.num_spec_tokens)
            )
        if self.dynamic_sd_lookup is None:
            # Without one, a request that joins by one token gets rows for a whole tree,
            # for which there is no tree and perhaps no room.
            every_size = self.scheduler_config.max_num_seqs + 1
            self.dynamic_sd_lookup = [self.num_spec_tokens] * every_size
            self._reasons = {SCHEDULE: NO_ROOM}
        # vLLM 0.33 asks for no drafts inside a prompt, nor before a request's last
        # token; but the SSMs read prompts along with the target.
        self.can_skip_drafts = False
        # Of requests with a grammar and drafts.
        self._trees: dict[str, TokenTree] = {}
        # Of the step whose output is being processed.
        self._worker = WorkerStats()
        self._step: StepStats | None = None
        if not self.vllm_config.speculative_config.options.ssms:
            # Nothing is drafted into these slots.
            self.num_lookahead_tokens = LEAST_LOOKAHEAD
        self._slots = SlotsOfTrees(
            self.kv_cache_manager, self.max_model_len, self.max_num_scheduled_tokens
        )
        # Since the last step whose numbers were taken.
        self._blocks: Counter[str] = Counter()
        self._checked = is_on(DEBUG_ENV)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM's; where it would preempt, trees give up their slots before."""
        lookahead, manager = self.num_lookahead_tokens, self.kv_cache_manager
        watermark, kept = manager.watermark_blocks, {}
        self._slots.most_of_one = self._most_rows_of_one()
        if self._slots.missing(self.running, lookahead) > 0:
            self.num_lookahead_tokens = LEAST_LOOKAHEAD
            # No request joins, as in a step of vLLM's that preempts.
            manager.watermark_blocks = manager.block_pool.num_gpu_blocks
            kept = self._give_back()
        output = super().schedule(*args, **kwargs)
        self.num_lookahead_tokens, manager.watermark_blocks = lookahead, watermark
        output.kept_blocks = kept
        for request in output.scheduled_new_reqs:
            # As in vLLM's prefix cache, what has a salt is not for everybody.
            salt = self.requests[request.req_id].cache_salt
            request.is_private = salt is not None
            # Another text may hold what this seed has once drawn, which would be tested
            # against the noise that it comes from.
            seed = request.sampling_params.seed
            request.looks_up_itself = self._tests_draws and seed is not None
        if self._checked:
            invariants.check_blocks(self)
            output.block_ids = {
                request.request_id: self.kv_cache_manager.get_block_ids(
                    request.request_id
                )
                for request in self.running
            }
        return output

    def update_draft_token_ids(self, draft_token_ids: DraftTrees) -> None:
        """As vLLM's, but grammars are not asked yet: they follow trees, not a chain."""
        self._trees = {r: t for r, t in self._trees.items() if r in self.requests}
        for req_id, tokens, parents in draft_token_ids.each():
            request = self.requests.get(req_id)
            if request is None or request.is_finished():
                continue
            request.spec_token_ids = [] if request.is_prefill_chunk else tokens
            if not request.use_structured_output:
                continue
            if PLACEHOLDER_TOKEN in tokens:
                request.spec_token_ids = []
            self._trees[req_id] = TokenTree.of(tokens, parents)

    def _handle_stopped_request(self, request: Request) -> bool:
        """As vLLM's; what was accepted behind the end of a turn is not computed.

        The next turn of such a session goes on behind the end.
        """
        if request.resumable:
            # The last token has not been run, whatever has been behind it.
            last = request.num_tokens - 1 + request.num_output_placeholders
            request.num_computed_tokens = min(request.num_computed_tokens, last)
        return super()._handle_stopped_request(request)

    def get_grammar_bitmask(
        self, scheduler_output: SchedulerOutput
    ) -> GrammarOutput | None:
        """What grammars allow at each scheduled row, along the paths of the trees."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        ids = [
            req_id
            for req_id in scheduler_output.num_scheduled_tokens
            if (request := self.requests.get(req_id))
            and request.use_structured_output
            and not request.is_prefill_chunk
        ]
        for req_id in ids:
            goes_on_behind_its_end(self.requests[req_id])
        if not any(req_id in drafts for req_id in ids):
            return super().get_grammar_bitmask(scheduler_output)
        trees = [self._scheduled_tree(r, drafts.get(r, [])) for r in ids]
        bitmask = bitmask_of_trees(
            self.structured_output_manager, [self.requests[r] for r in ids], trees
        )
        return GrammarOutput(ids, bitmask, list(map(len, trees)))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As vLLM's; what the step adds to the metrics goes along."""
        worker = getattr(model_runner_output, "tree_stats", None)
        if self.log_stats and worker is not None:
            self._worker = worker
            self._step = self._stats_of(scheduler_output, worker)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._checked:
            invariants.check_blocks(self)
        return outputs

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        *,
        request_id: str,
        **counts: Any,
    ) -> SpecDecodingStats | None:
        """As vLLM's, of trees that have nodes, and without drafts that pad prompts.

        vLLM gives a request that joins with one token as many drafts as the others may
        have, so that all have as many rows; there is no tree behind them.
        """
        if not self._worker.num_nodes.get(request_id):
            return spec_decoding_stats
        return super().make_spec_decoding_stats(
            spec_decoding_stats, request_id=request_id, **counts
        )

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's statistics with ours among the numbers about KV connectors.

        A front end in another process gets only the fields that vLLM's class has. These
        numbers are all 0, as connectors are refused, and a key too many harms nobody.
        """
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._step is not None:
            self._step.put_into(stats.num_kv_fetch_reqs_by_stage)
            self._step = None
        return stats

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """As vLLM's, which asks for the next drafts here: no more than have room."""
        scheduler_output.num_spec_tokens_to_schedule = self._most_nodes(
            scheduler_output.num_spec_tokens_to_schedule,
            scheduler_output.num_scheduled_tokens,
        )
        super()._update_after_schedule(scheduler_output)

    def _most_rows_of_one(self) -> int:
        """Rows of one request in the next step, as vLLM limits long prompts."""
        num_reqs, most = sum(self.get_request_counts()), self.max_num_scheduled_tokens
        threshold = self.scheduler_config.long_prefill_token_threshold
        if num_reqs < 2 or threshold <= 0:
            return most
        if self.adaptive_long_prefill_threshold:
            threshold = max(threshold, most // num_reqs)
        return min(threshold, most)

    def _most_nodes(self, most: int, scheduled: dict[str, int]) -> int:
        """Nodes of a tree, so many at most, so that all have rows in the next step.

        vLLM gives rows to whom it has had longest first, and then to prompts. While
        there are any, half of the rows are theirs: a node is only a guess. A prompt
        that is not run in chunks has as many as it needs.
        """
        num_running, num_waiting = self.get_request_counts()
        # Nobody knows when the next turn of a session comes.
        num_waiting -= self.num_waiting_for_streaming_input
        joining = min(num_waiting, max(0, self.max_num_active_reqs - num_running))
        # Whoever holds no blocks needs one at least. Sessions that wait hold some, too.
        num_free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        num_holding = len(self.kv_holding_waiting)
        num_holding -= self.num_waiting_for_streaming_input
        joining = min(joining, num_free + max(num_holding, 0))
        num_reqs, num_rows = num_running + joining, self.max_num_scheduled_tokens
        most = min(most, self._most_rows_of_one() - 1)
        if joining and num_running:
            most = min(most, self._rows_beside_prompt(num_running) // num_running - 1)
        most = max(0, most)
        if num_reqs * (1 + most) <= num_rows // 2:
            return most
        if joining or any(
            request.num_computed_tokens + scheduled.get(request.request_id, 0)
            < request.num_tokens
            for request in self.running
        ):
            num_rows //= 2
        return min(most, max(0, num_rows // num_reqs - 1))

    def _rows_beside_prompt(self, num_running: int) -> int:
        """Rows that the next prompt leaves to so many requests; all where it need not.

        Without chunked prefill it waits for a step with rows for all of its tokens.
        Where these requests leave too few even without trees, trees stay as they are.
        """
        num_rows = self.max_num_scheduled_tokens
        if self.scheduler_config.enable_chunked_prefill:
            return num_rows
        ready = (
            request.num_tokens - request.num_computed_tokens
            for queue in (self.kv_holding_waiting, self.waiting)
            for request in queue
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        )
        left = num_rows - min(next(ready, 0), self._most_rows_of_one())
        return left if left >= num_running else num_rows

    def _give_back(self) -> dict[str, list[int]]:
        """Free the blocks that the step lacks, or do without; see `SlotsOfTrees`."""
        pool = self.kv_cache_manager.block_pool
        num_free = pool.get_num_free_blocks()
        slots, asked = self._slots, (self.running, LEAST_LOOKAHEAD)
        kept = slots.give_back(*asked, slots.missing(*asked))
        for num_kept in (None, 1, 0):
            if (missing := slots.missing(*asked)) <= 0:
                break
            slots.cut_drafts(*asked, missing, num_kept)
            kept |= slots.give_back(*asked, slots.missing(*asked))
        returned = pool.get_num_free_blocks() - num_free
        self._blocks.update({SHORT_STEPS: 1, RETURNED_BLOCKS: returned})
        if self._checked:
            invariants.check_blocks(self)
        return kept

    def _stats_of(
        self, scheduler_output: SchedulerOutput, worker: WorkerStats
    ) -> StepStats:
        step = StepStats(drafted=worker.drafted, blocks=self._blocks)
        self._blocks = Counter()
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(req_id)
            if request is None or request.is_finished():
                continue  # aborted meanwhile: vLLM counts nothing of it either
            if worker.num_nodes.get(req_id):
                step.accepted.update(worker.accepted[req_id])
            elif (
                num_tokens - len(drafts.get(req_id, ())) > 1
                or not request.num_output_tokens
            ):
                step.plain[PREFILL] += 1
            else:
                reason = worker.reasons.get(req_id, NO_ROOM)
                step.plain[self._reasons.get(reason, reason)] += 1
        for phase, seconds in worker.seconds.items():
            step.microseconds[phase] = round(seconds * 1e6)
        return step

    def _scheduled_tree(self, req_id: str, drafts: list[int]) -> TokenTree:
        """The tree of a request's scheduled drafts; placeholders are no nodes."""
        if PLACEHOLDER_TOKEN in drafts:
            return TokenTree.of(drafts, [NO_NODE] * len(drafts))
        parents = self._trees[req_id].parents if drafts else []
        return TokenTree.of(drafts, parents[: len(drafts)])
