"""Which steps are drafted for ahead of the host, and what it hears of them later.

With asynchronous scheduling a step whose trees come from SSMs in graphs, from lookups,
or from both is drafted for as soon as it is launched. Of prompts the host knows the
tokens, so the SSMs read them then, too. All other steps wait for the device
(`TreeSpeculator.draft`): those with more requests than graphs are captured for, with
processors other than penalties that look back at paths of many tokens, or with lookups
whose certain draws are tested, beside a lookup always, else where they are to have
trees; those after which the SSMs have to read what they have sat out, and those in
which a head, which reads the target's states, has too many of them left. All ranks
decide alike (`scheduling/lessons.py`). Grammars ask for the trees while the target runs
over them.

Dimension legend: S request slots, B requests of the batch, R of them get a tree, P are
inside their prompts, N nodes per request.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_specinfer.device import Once, stage
from vllm_specinfer.drafting.ahead import AheadDrafter, Found
from vllm_specinfer.drafting.ahead_trees import AheadTrees, Roles
from vllm_specinfer.drafting.children import DraftRows
from vllm_specinfer.drafting.source import DraftStep
from vllm_specinfer.drafting.sources import (
    Decision,
    SourceSet,
    ssm_work,
)
from vllm_specinfer.drafting.target_states import TargetStates
from vllm_specinfer.scheduling.budget import Budget
from vllm_specinfer.scheduling.device_clock import DeviceClock
from vllm_specinfer.scheduling.lessons import IN_FLIGHT, Lessons
from vllm_specinfer.scheduling.request_chances import RequestChances
from vllm_specinfer.scheduling.step_stats import (
    BUDGET,
    MEASURING,
    SCHEDULE,
    WorkerStats,
)
from vllm_specinfer.tree.device_plan import DevicePlan
from vllm_specinfer.tree.token_tree import NO_NODE
from vllm_specinfer.verify.chains import needs_chain

# Each row that looks back gets a chain as long as trees may be deep.
MOST_LOOKED_BACK = 16
# Requests that have come to a slot, and those that have gone.
COME, GONE = 0, 1


class AheadSteps:
    """Decides and launches.

    Attributes:
        sizes: Rows that the trees of the last batch have below their roots, by request
            id; None where the host has drafted them.
        trees: Those of them that have been launched.
        count: Waits for them and counts them.
    """

    def __init__(
        self,
        drafter: AheadDrafter,
        sources: SourceSet,
        budget: Budget,
        sampler: Sampler,
        num_computed: torch.Tensor,
        tokens: Callable[[], np.ndarray],
        names: Sequence[str],
        lessons: Lessons,
        tests_draws: bool,
    ) -> None:
        """Draft nothing yet.

        Args:
            drafter: Launches.
            sources: Its sources, which learn.
            budget: Theirs.
            sampler: vLLM's.
            num_computed: [S] int32 tokens whose K/V there is, on the device.
            tokens: Gives [S, max_model_len] the texts as far as they are known.
            names: Of the sources.
            lessons: Gets what steps bring.
            tests_draws: As `DraftStep.tests_draws`.
        """
        self._drafter = drafter
        self._sources, self._budget = sources, budget
        self._sampler, self._tests_draws = sampler, tests_draws
        self._num_computed = num_computed
        self._tokens = tokens
        # [S, max_model_len] what the requests began with; the texts' may come later.
        self._prompts = np.zeros(tokens().shape, np.int32)
        self._names = names
        ssms = [source.ssm for source in sources.ssms]
        self._heads = [ssm for ssm in ssms if ssm.reads_states]
        self._lessons = lessons
        self._clock = DeviceClock(num_computed.device, lessons)
        # [2, S] how many requests have come to each slot and gone.
        self._changes = np.zeros((2, len(num_computed)), np.int64)
        # [S] heads get states of these requests' last steps when they are learned of.
        self._states_come = np.zeros(len(num_computed), bool)
        # Rows of states of these steps.
        self._num_coming = 0
        self._any_started = False
        # Of trees that SSMs were asked for, and of lookups alone.
        self._chances, self._known = (
            RequestChances(len(num_computed), drafter.buffers.tokens.shape[1])
            for _ in range(2)
        )
        self.stop()

    def leave(self, slot: int, ended: bool) -> None:
        """A request has left its slot, and its blocks may soon be another's.

        Unless it has ended it comes again, and is then read from its beginning.
        """
        self._changes[GONE, slot] += 1
        self._changes[COME, slot] += not ended

    def start(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot; it has no tree."""
        self._changes[COME, slot] += 1
        self._any_started = True
        self._states_come[slot] = False
        self._chances.start(slot)
        self._known.start(slot)
        prompt = request.prefill_token_ids
        self._prompts[slot, : len(prompt)] = prompt
        if self.sizes:
            self.sizes.pop(request.req_id, None)

    def stop(self) -> None:
        """The host drafts for this step; all that there was to learn is learned."""
        self.sizes: dict[str, int] | None = None
        self._states_come[:] = False
        self._draft_none()
        self._clock.restart()

    def _draft_none(self) -> None:
        self.trees: AheadTrees | None = None
        self.count: Callable[[], None] = lambda: None

    def takes(self, batch: InputBatch) -> bool:
        """Whether trees of a step may be drafted ahead, but for its size."""
        slots = batch.idx_mapping_np
        temperatures = self._sampler.sampling_states.temperature.np[slots]
        # Of what lookups propose only the host makes draws.
        lookups_draw = self._tests_draws and len(self._sources.lookups)
        return not (
            (lookups_draw and temperatures.any())
            or (
                self._drafter.buffers.max_depth > MOST_LOOKED_BACK
                and needs_chain(self._sampler, slots).any()
            )
        )

    def draft(
        self,
        batch: InputBatch,
        num_new: torch.Tensor,
        states: TargetStates | None,
        most: int,
        stats: WorkerStats,
    ) -> torch.Tensor | Decision | None:
        """Draft for a step, or decide that it gets no trees.

        Args:
            batch: The batch just verified.
            num_new: [B] int32 tokens that it has brought, on the device.
            states: The target's, where heads read them.
            most: Nodes of a tree in the next step.
            stats: Of the next step.

        Returns:
            [B, N] int64 tokens of the nodes; what has been decided, if anything, where
            the host goes on: it has to draft (`takes`), the SSMs have more to read than
            this step's tokens, or a head has kept what it has to read for too long.
        """
        takes = self.takes(batch)
        if not takes and self._sources.lookups:
            return None
        roles = Roles.of(batch)
        self._time_step(batch)
        self._lessons.learn(IN_FLIGHT)
        follows = self._drafter.follows(roles.decoding)
        decided = self._decided(batch, roles, most, follows)
        if decided.asks:
            # Nor can a head read on in a prompt behind states that are still to come.
            comes = self._states_come[roles.prompts].any()
            fits = batch.num_reqs <= self._drafter.max_num_reqs
            waits = not (takes and fits and follows) or comes
        else:
            num_more = self._num_coming + batch.num_tokens
            waits = any(head.is_full(num_more) for head in self._heads)
        if waits:
            return decided
        if decided.asks and len(roles.prompts):
            self._read(roles, batch.query_start_loc_np, states)
        self._lessons.end_step()
        self._draft_none()
        sizes = np.zeros(len(roles.slots), int)
        looks_up = decided.grows and self._sources.lookups
        if len(roles.slots) and (decided.asks or looks_up):
            chances = self._chances if decided.asks else self._known
            sizes = self._budget.nodes(chances.of(roles.slots), most, decided.asks)
            found = self._launched(roles, num_new, states, decided.asks)
            self.trees = trees = AheadTrees(found, roles, sizes)
            self.count = Once(lambda: trees.count(self._names, stats))
            changes = self._changes[:, roles.slots]
            self._lessons.add(lambda: self._learn(trees, changes, decided.asks))
        if not decided.asks:
            self._sit_out(batch, num_new, states)
        found_sizes = dict(zip(roles.req_ids, sizes.tolist(), strict=True))
        self.sizes = {req_id: size for req_id, size in found_sizes.items() if size}
        reason = BUDGET if decided.grows else MEASURING if most else SCHEDULE
        stats.reasons |= dict.fromkeys(found_sizes.keys() - self.sizes.keys(), reason)
        return self._drafter.buffers.tokens[batch.idx_mapping]

    def plan(self, batch: InputBatch) -> DevicePlan | None:
        """Of a batch to be verified; None where its trees are the host's, or none."""
        if not self.sizes:
            return None
        has_tree = np.array([req_id in self.sizes for req_id in batch.req_ids])
        return DevicePlan.of(batch, has_tree, self._drafter.buffers, self._num_computed)

    def _decided(
        self, batch: InputBatch, roles: Roles, most: int, follows: bool
    ) -> Decision:
        num_reqs = len(roles.slots)
        if not most or not self._budget.grows(num_reqs):
            return Decision(grows=False, asks=False)
        if follows:
            slots, known, unread = roles.prompts, roles.ends, num_reqs
        else:
            # At most; exact where there were no trees.
            slots, unread = batch.idx_mapping_np, 0
            known = batch.num_computed_tokens_np + batch.num_scheduled_tokens + 1
        ssms = [source.ssm for source in self._sources.ssms]
        unread += sum(ssm.kv.num_unread(slots, known + ssm.lookahead) for ssm in ssms)
        asks = bool(ssms) and (
            self._sources.reading or self._budget.drafts(num_reqs, unread, most=most)
        )
        return Decision(grows=True, asks=asks)

    def _read(
        self, roles: Roles, starts: np.ndarray, states: TargetStates | None
    ) -> None:
        """The SSMs read what the host knows of prompts.

        Args:
            roles: Whose.
            starts: [B + 1] first row of each request.
            states: Of all rows, where heads read them; that of a prompt's last token
                they read with the token behind it, which only the device knows.
        """
        none = np.zeros(0, np.int64)
        step = DraftStep(
            slots=roles.prompts,
            num_tokens=roles.ends,
            growing=none,
            roots=DraftRows.of_roots(self._sampler.sampling_states, none, none),
            all_token_ids=self._prompts,
            tests_draws=False,
        )
        if states is not None:
            first, last = starts[roles.reading], starts[roles.reading + 1] - roles.ended
            step = replace(
                step,
                states=states.rows(np.concatenate([*map(np.arange, first, last)])),
                state_starts=np.concatenate([[0], np.cumsum(last - first)]),
            )
        for source in self._sources.ssms:
            # A head's row reads the token behind it, too.
            ahead = np.where(roles.ended, 0, source.ssm.lookahead)
            source.ssm.catch_up(replace(step, num_tokens=roles.ends + ahead))
        budget, num_reqs = self._budget, max(1, len(roles.slots))
        self._clock.lap(lambda seconds: budget.observe_prompts(num_reqs, seconds))

    def _sit_out(
        self, batch: InputBatch, num_new: torch.Tensor, states: TargetStates | None
    ) -> None:
        """The SSMs read nothing; heads keep the states that they will have to read."""
        slots = batch.idx_mapping_np
        for source in self._sources.ssms:
            source.ssm.kv.fall_behind(slots)
        if states is None:
            return
        self._states_come[slots] = True
        num_coming = batch.num_tokens
        self._num_coming += num_coming
        starts = batch.query_start_loc_np[: batch.num_reqs + 1].copy()
        wait = states.that_stay(starts, batch.is_prefilling_np, num_new)
        come = self._changes[COME, slots]

        def keep() -> None:
            self._num_coming -= num_coming
            same = self._changes[COME, slots] == come
            for slot, is_same, new in zip(slots.tolist(), same, wait(), strict=True):
                for head in self._heads if is_same else ():
                    head.keep(slot, new)

        self._lessons.add(keep)

    def _time_step(self, batch: InputBatch) -> None:
        """The step's verification has been launched."""
        budget, num_rows = self._budget, batch.num_tokens
        trees = num_rows > batch.num_reqs
        if self._any_started or batch.has_prefill:
            # The device may have waited for a request; prompts take their own time.
            self._clock.restart()
        self._any_started = False
        self._clock.lap(lambda seconds: budget.observe_step(num_rows, seconds, trees))

    def _launched(
        self,
        roles: Roles,
        num_new: torch.Tensor,
        states: TargetStates | None,
        asks: bool,
    ) -> Callable[[], Found]:
        """What waits for the trees of SSMs and lookups, or of lookups alone."""
        if not asks:
            found = self._drafter.look_up(roles.slots)
            self._clock.lap(lambda seconds: None)  # next to nothing
            return found
        if len(roles.prompts):
            (growing,) = stage(num_new.device, roles.growing)
            num_new = num_new[growing]
            states = states and states.of(growing)
        budget, ssms, num_reqs = self._budget, self._sources.ssms, len(roles.slots)
        before = ssm_work(ssms)
        # The positions of roots are the device's.
        roots = DraftRows.of_roots(
            self._sampler.sampling_states, roles.slots, np.zeros(num_reqs, int)
        )
        wait = self._drafter.launch(roles.slots, num_new, roots, states)
        rows, levels = np.subtract(ssm_work(ssms), before)
        self._clock.lap(
            lambda seconds: budget.observe_draft(
                num_reqs, int(rows), int(levels), seconds, follows=True
            )
        )
        return wait

    def _learn(self, trees: AheadTrees, changes: np.ndarray, asks: bool) -> None:
        """What has been found is told to sources and budget.

        Args:
            trees: What has been found.
            changes: [2, R] how many requests had come to their slots and gone.
            asks: The SSMs were asked.
        """
        found, slots, has_row = trees.found(), trees.slots, trees.has_row
        same = self._changes[:, slots] == changes
        alive = np.flatnonzero(same.all(axis=0)).tolist()
        tokens, lookups = self._tokens(), self._sources.lookups
        for source in lookups:
            for i in np.flatnonzero(same[COME]).tolist():
                text = tokens[slots[i], : found.lengths[i]]
                source.has_read(int(slots[i]), text)
        ssms = self._sources.ssms if asks else []
        for source, grown in zip(ssms, found.grown, strict=True):
            source.on_device.levels.observe(grown)
            for i in alive:
                slot = int(slots[i])
                source.ssm.kv.has_read(slot, int(found.lengths[i]), tokens[slot])
        # Nodes without a row were never tested.
        parents = np.where(has_row, found.parents, NO_NODE)
        given = np.where(has_row[:, None], found.given, -np.inf)
        for slot, *of_tree in zip(slots.tolist(), parents, given, strict=True):
            self._sources.experience.note_tree(slot, *of_tree)
        self._budget.observe_chances(found.scores, trees.sizes, asks)
        come = same[COME]
        if asks:
            self._chances.observe(slots[come], found.scores[come])
        if lookups:
            known = found.given[:, : len(lookups)].max(axis=1)
            known = -np.sort(-known, axis=1)
            self._budget.observe_known(known)
            self._known.observe(slots[come], known[come])
