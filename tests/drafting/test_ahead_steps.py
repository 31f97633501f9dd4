"""What is decided before a step is known, and what is learned of it afterwards."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_specinfer.drafting import ahead_steps
from vllm_specinfer.drafting.ahead import Found
from vllm_specinfer.drafting.ahead_steps import AheadSteps
from vllm_specinfer.drafting.target_states import TargetStates
from vllm_specinfer.scheduling.budget import Budget
from vllm_specinfer.scheduling.lessons import Lessons
from vllm_specinfer.scheduling.step_stats import (
    BUDGET,
    MEASURING,
    NO_CANDIDATES,
    SCHEDULE,
    WorkerStats,
)
from vllm_specinfer.tree.on_device import TreeBuffers
from vllm_specinfer.tree.token_tree import NO_NODE, ROOT

SLOTS, NODES = 4, 3
CPU = torch.device("cpu")
NONE = -np.inf


class Chosen(Budget):
    """A budget that says what it is told to, and notes what it hears."""

    grow = draft = True
    size = size_of_lookups = NODES

    def __init__(self):
        self.steps, self.drafts_timed, self.chances, self.unread = [], [], [], []
        self.known, self.expected, self.prompts_timed = [], [], []

    def grows(self, num_reqs):
        return self.grow

    def drafts(self, num_reqs, unread=0, known=None, most=None):
        self.unread.append(unread)
        return self.draft

    def nodes(self, chances, most, asks=True):
        self.expected.append(chances)
        sizes = np.full(len(chances), self.size if asks else self.size_of_lookups)
        return np.minimum(sizes, most)

    def observe_step(self, rows, seconds, trees):
        self.steps.append((rows, trees))

    def observe_draft(self, num_reqs, rows, levels, seconds, follows=False):
        self.drafts_timed.append((num_reqs, rows, levels, follows))

    def observe_prompts(self, num_reqs, seconds):
        assert seconds > 0
        self.prompts_timed.append(num_reqs)

    def observe_chances(self, scores, num_nodes, asks=True):
        self.chances.append((scores, num_nodes, asks))

    def observe_known(self, scores):
        self.known.append(scores)


class Ssm:
    """Follows as it is told to; notes who falls behind, what it has read and keeps."""

    work = (0, 0)
    lookahead, reads_states, most_kept = 0, False, 99

    def __init__(self):
        self.ssm = self.kv = self.on_device = self.levels = self
        self.kept = {}
        self.behind, self.read, self.grown, self.caught_up = [], [], [], []

    def fall_behind(self, slots):
        self.behind += slots.tolist()

    def is_full(self, num_more):
        return num_more > self.most_kept

    def keep(self, slot, states):
        self.kept[slot] = states[:, 0].tolist()

    def num_unread(self, slots, num_tokens):
        return int((num_tokens - self.lookahead - 7).sum())

    def has_read(self, slot, num_tokens, tokens):
        assert tokens[0] == 100 + slot
        self.read.append((slot, num_tokens))

    def catch_up(self, step):
        assert not len(step.growing)
        for slot, end in zip(step.slots.tolist(), step.num_tokens, strict=True):
            self.caught_up.append((slot, step.all_token_ids[slot, :end].tolist()))
        if self.lookahead:
            starts = step.state_starts.tolist()
            self.states = [
                step.states[begin:end, 0].tolist() for begin, end in pairwise(starts)
            ]

    def observe(self, scores):
        self.grown.append(scores)


class Lookup:
    """Notes what it has read."""

    def __init__(self):
        self.read = []

    def has_read(self, slot, tokens):
        assert (tokens == 100 + slot).all()
        self.read.append((slot, len(tokens)))


class Drafter:
    """Finds what it is told to."""

    max_num_reqs = 3

    def __init__(self, ssms):
        self.buffers = TreeBuffers(SLOTS, NODES, NODES, CPU)
        self.buffers.tokens[:SLOTS] = torch.arange(SLOTS)[:, None]
        self.is_following, self.ssms, self.lagging = True, ssms, []
        self.launched, self.looked_up, self.num_heard = [], [], 0

    def follows(self, slots):
        return self.is_following and not np.isin(slots, self.lagging).any()

    def launch(self, slots, num_new, roots, states):
        assert num_new.tolist() == [1 + slot for slot in slots]
        self.states = states
        self.launched.append(slots.tolist())
        for ssm in self.ssms:
            ssm.work = ssm.work[0] + 10, ssm.work[1] + 2

        def found():
            self.num_heard += 1
            num_reqs = len(slots)
            # A chain; the second node is the second SSM's. The last request has none.
            parents = np.tile(np.array([ROOT, 0, 1], np.int32), (num_reqs, 1))
            scores = np.tile(np.float32([-0.1, -0.2, -0.3]), (num_reqs, 1))
            given = np.full((num_reqs, 2, NODES), NONE, np.float32)
            given[:, 0, [0, 2]] = given[:, 1, 1:] = -0.5
            if num_reqs > 1:
                parents[-1], scores[-1], given[-1] = NO_NODE, NONE, NONE
            lengths = np.array([20 + slot for slot in slots], np.int32)
            return Found(lengths, parents, scores, given, (scores, scores))

        return found

    def look_up(self, slots):
        self.looked_up.append(slots.tolist())

        def found():
            num_reqs = len(slots)
            parents = np.tile(np.array([ROOT, ROOT, NO_NODE], np.int32), (num_reqs, 1))
            scores = np.tile(np.float32([-0.1, -0.2, NONE]), (num_reqs, 1))
            lengths = np.array([20 + slot for slot in slots], np.int32)
            return Found(lengths, parents, scores, scores[:, None, ::-1], ())

        return found


@pytest.fixture
def steps(monkeypatch):
    """Ahead steps with two SSMs; all that they talk to is an attribute."""
    sources = SimpleNamespace(lookups=[], ssms=[Ssm(), Ssm()], reading=False, notes={})
    sources.experience = SimpleNamespace(
        note_tree=lambda slot, *tree: sources.notes.update({slot: tree})
    )
    values = {"temperature": [0, 0.5, 1.0, 0], "seeds": [0] * 4, "top_k": [9] * 4}
    values |= {"top_p": [1] * 4, "min_p": [0] * 4}
    arrays = {k: SimpleNamespace(np=np.array(v)) for k, v in values.items()}
    sampler = SimpleNamespace(sampling_states=SimpleNamespace(**arrays))
    monkeypatch.setattr(
        ahead_steps, "needs_chain", lambda sampler, slots: np.isin(slots, sampler.back)
    )
    sampler.back = []
    drafter, budget, lessons = Drafter(sources.ssms), Chosen(), Lessons()
    tokens = np.arange(SLOTS)[:, None] + np.full((SLOTS, 30), 100)
    result = AheadSteps(
        drafter,
        sources,
        budget,
        sampler,
        torch.zeros(SLOTS, dtype=torch.int32),
        lambda: tokens,
        ["one", "two"],
        lessons,
        tests_draws=False,
    )
    result.lessons = lessons
    result.drafter, result.budget, result.sources = drafter, budget, sources
    result.sampler = sampler
    return result


def a_batch(slots, nodes=0, read=None, **more):
    """Requests `r<slot>`, each with so many nodes that were verified.

    Of 9 tokens of a prompt a step has read another 4 behind those of `read`, by slot;
    the other requests are decoding.
    """
    count, read = len(slots), read or {}
    before = np.array([read.get(slot, 9) for slot in slots])
    return SimpleNamespace(
        **more,
        has_prefill=bool(read),
        prefill_len_np=np.full(count, 9),
        is_prefilling_np=before < 9,
        num_computed_prefill_tokens_np=before,
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=np.array(slots),
        req_ids=[f"r{slot}" for slot in slots],
        num_reqs=count,
        num_tokens=count * (nodes + 1),
        num_computed_tokens_np=np.full(count, 10),
        num_scheduled_tokens=(num_rows := np.where(before < 9, 4, nodes + 1)),
        query_start_loc_np=np.append(0, np.cumsum(num_rows)),
    )


def draft(steps, batch, most=NODES, states=None):
    stats, num_new = WorkerStats(), batch.idx_mapping.int() + 1
    return steps.draft(batch, num_new, states, most, stats), stats


def start(steps, slot, name="new", tokens=()):
    request = SimpleNamespace(req_id=name, prefill_token_ids=list(tokens))
    steps.start(slot, request)


def test_steps_that_need_the_host_are_not_taken(steps):
    assert steps.takes(a_batch([0, 1, 3]))
    assert steps.takes(a_batch([0, 3], read={0: 0}))
    steps.sampler.back = [3]
    assert steps.takes(a_batch([0, 3]))
    steps.drafter.buffers.max_depth = 17  # so long would each row's chain be
    assert not steps.takes(a_batch([0, 3]))
    assert steps.takes(a_batch([0, 1]))


def test_lookups_of_sampled_requests_need_the_host_where_draws_are_tested(steps):
    steps._tests_draws = True
    assert steps.takes(a_batch([0, 1]))
    steps.sources.lookups = [Lookup()]
    assert steps.takes(a_batch([0, 3]))
    assert not steps.takes(a_batch([0, 1]))
    steps._tests_draws = False
    assert steps.takes(a_batch([0, 1]))


def test_all_requests_get_rows_for_the_usual_tree(steps):
    steps.budget.size = 2
    tokens, stats = draft(steps, a_batch([3, 0]))
    assert tokens[:, 0].tolist() == [3, 0]
    assert steps.sizes == {"r3": 2, "r0": 2}
    assert steps.drafter.num_heard == 0 and not stats.drafted
    steps.count()
    steps.count()
    assert not steps.sources.notes and not steps.budget.chances
    steps.lessons.learn()
    assert steps.drafter.num_heard == 1
    # The third node has no row; the second is the second SSM's alone.
    assert stats.drafted == {"one": 1, "two": 1}
    assert stats.reasons == {"r0": NO_CANDIDATES}
    parents, given = steps.sources.notes[3]
    assert parents.tolist() == [ROOT, 0, NO_NODE]
    assert np.isfinite(given).tolist() == [[True, False, False], [False, True, False]]
    assert [ssm.read for ssm in steps.sources.ssms] == [[(3, 23), (0, 20)]] * 2
    ((scores, num_nodes, asks),) = steps.budget.chances
    assert scores.shape == (2, NODES) and num_nodes.tolist() == [2, 2] and asks
    assert not steps.budget.known
    assert [steps.trees.num_nodes(slot) for slot in (3, 0)] == [3, 0]
    assert steps.trees.sources_of_nodes()(3, [0, 1, 2]) == [0, 1, 0]
    assert steps.trees.sources_of_nodes()(0, []) == []


def test_each_request_gets_rows_for_a_tree_of_its_own(steps):
    steps.budget.size = np.array([3, 0, 1])
    _, stats = draft(steps, a_batch([3, 1, 0]))
    assert steps.sizes == {"r3": 3, "r0": 1}
    steps.count()
    # The last request's tree has no node; the other two are as in `Drafter`.
    assert stats.reasons == {"r1": BUDGET, "r0": NO_CANDIDATES}
    assert stats.drafted == {"one": 2, "two": 1}
    assert steps.trees.parents() == {"r3": [ROOT, 0, 1], "r1": [], "r0": [NO_NODE]}
    steps.lessons.learn()
    assert steps.sources.notes[1][0].tolist() == [NO_NODE] * NODES
    assert not np.isfinite(steps.sources.notes[1][1]).any()
    ((_, num_nodes, _),) = steps.budget.chances
    assert num_nodes.tolist() == [3, 0, 1]


def test_what_the_budget_expects_of_a_request_is_what_its_trees_were(steps):
    for slots in ([3, 0], [3, 0], [0, 3]):
        draft(steps, a_batch(slots))
        steps.lessons.learn()
    start(steps, 0)
    draft(steps, a_batch([3, 0, 1]))
    unknown, early, late, last = steps.budget.expected
    likely = np.exp(np.float32([-0.1, -0.2, -0.3]))
    assert np.isnan(unknown).all()
    # A tree of no node, once, had been the second request's.
    assert early == pytest.approx(np.array([likely, 0 * likely]))
    assert late == pytest.approx(np.array([0 * likely, likely]))
    assert last[0] == pytest.approx(likely * 2 / 3)
    assert np.isnan(last[1:]).all()


def test_what_is_heard_late_of_a_request_is_not_expected_of_the_next(steps):
    draft(steps, a_batch([3, 0]))
    start(steps, 3)
    steps.lessons.learn()
    draft(steps, a_batch([3, 0]))
    assert np.isnan(steps.budget.expected[1][0]).all()
    assert not np.isnan(steps.budget.expected[1][1]).any()


def end(steps, slot):
    steps.leave(slot, ended=True)


def preempt(steps, slot):
    steps.leave(slot, ended=False)


@pytest.mark.parametrize("change", [start, end, preempt])
def test_what_is_gone_when_it_is_learned_of_has_no_kv(steps, change):
    """Its tree is still compared; its text is known until another comes, or itself."""
    steps.sources.lookups = [Lookup()]
    draft(steps, a_batch([3, 1]))
    change(steps, 3)
    steps.lessons.learn()
    assert [slot for slot, _ in steps.sources.ssms[0].read] == [1]
    of_texts = [slot for slot, _ in steps.sources.lookups[0].read]
    assert of_texts == ([3, 1] if change is end else [1])
    assert list(steps.sources.notes) == [3, 1]


def test_a_request_that_begins_anew_has_no_tree(steps):
    draft(steps, a_batch([3, 1]))
    start(steps, 2, "r3")
    assert steps.sizes == {"r1": NODES}
    batch = a_batch([3, 1], NODES)
    batch.num_draft_tokens_per_req = np.full(2, NODES, np.int32)
    batch.query_start_loc_np = np.array([0, 4, 8], np.int32)
    batch.query_start_loc = torch.from_numpy(batch.query_start_loc_np)
    assert steps.plan(batch).is_tree.tolist() == [False, True]
    steps.stop()
    assert steps.plan(batch) is None and steps.sizes is None


def test_where_the_ssms_have_more_to_read_the_host_drafts(steps):
    steps.drafter.is_following = False
    found, _ = draft(steps, a_batch([3, 0]))
    assert found == (True, True) and not steps.drafter.launched
    # 12 tokens with the last step's new one, 7 of which each SSM has read.
    assert steps.budget.unread == [2 * 2 * 5]


def test_a_catch_up_in_pieces_is_decided_on_once(steps):
    steps.drafter.is_following, steps.budget.draft = False, False
    steps.sources.reading = True
    found, _ = draft(steps, a_batch([3, 0]))
    assert found == (True, True) and steps.budget.unread == []


def test_prompts_are_read_and_who_has_ended_one_gets_a_tree(steps):
    tokens = {slot: [50 + 10 * slot + i for i in range(9)] for slot in (0, 1, 2)}
    for slot, prompt in tokens.items():
        start(steps, slot, tokens=prompt)
    # The first ends its prompt, the second does not, the third decodes.
    batch = a_batch([0, 1, 3], read={0: 5, 1: 4})
    found, _ = draft(steps, batch)
    assert found.shape == (3, NODES)
    assert steps.drafter.launched == [[0, 3]]
    assert steps.sizes == {"r0": NODES, "r3": NODES}
    read = [(0, tokens[0]), (1, tokens[1][:8])]
    assert [ssm.caught_up for ssm in steps.sources.ssms] == [read] * 2
    # Two of theirs, and what each SSM has not read of 9 and 8 tokens.
    assert steps.budget.unread == [2 + 2 * (2 + 1)]
    # Nobody is told what the step with prompts took; reading them is no draft.
    draft(steps, a_batch([0, 3], NODES))
    draft(steps, a_batch([0, 3], NODES))
    steps.lessons.learn()
    assert steps.budget.steps == [(8, True)] * 2
    assert steps.budget.prompts_timed == [2]
    assert steps.budget.drafts_timed == [(2, 20, 4, True)] * 3


def test_heads_read_the_states_of_prompts(steps):
    head = steps.sources.ssms[1]
    head.lookahead, head.reads_states = 1, True
    tokens = {slot: [50 + 10 * slot + i for i in range(9)] for slot in (0, 1)}
    for slot, prompt in tokens.items():
        start(steps, slot, tokens=prompt)
    # The first ends its prompt, the second decodes, the third does not end it.
    batch = a_batch([0, 3, 1], read={0: 5, 1: 4})
    rows = torch.arange(9.0)[:, None]
    path = torch.tensor([[0], [7], [0]])
    states = TargetStates(rows, torch.tensor([3, 4, 8]), path)
    draft(steps, batch, states=states)
    # The last token's states go with the one behind it, which the host does not know.
    assert head.caught_up == [(0, tokens[0]), (1, tokens[1])]
    assert head.states == [[0, 1, 2], [5, 6, 7, 8]]
    assert steps.sources.ssms[0].caught_up == [(0, tokens[0]), (1, tokens[1][:8])]
    assert steps.drafter.launched == [[0, 3]]
    assert steps.drafter.states.first.tolist() == [3, 4]
    assert steps.drafter.states.path.tolist() == [[0], [7]]


def test_inside_prompts_nobody_gets_a_tree(steps):
    start(steps, 1, tokens=range(9))
    found, stats = draft(steps, a_batch([1], read={1: 0}))
    assert found.shape == (1, NODES) and steps.sizes == {} and not stats.reasons
    assert steps.sources.ssms[0].caught_up == [(1, [0, 1, 2, 3])]
    steps.lessons.learn()
    assert not steps.drafter.launched and not steps.drafter.num_heard


def test_prompts_wait_where_ssms_sit_out_or_the_host_drafts(steps):
    steps.budget.draft = False
    batch = a_batch([0, 3], read={0: 5})
    draft(steps, batch)
    assert [ssm.behind for ssm in steps.sources.ssms] == [[0, 3]] * 2
    steps.budget.draft, steps.drafter.lagging = True, [3]
    assert draft(steps, batch)[0] == (True, True)
    assert not any(ssm.caught_up for ssm in steps.sources.ssms)
    assert not steps.drafter.launched


@pytest.mark.parametrize("another_comes", [True, False])
def test_no_prompt_is_read_behind_states_that_a_head_still_gets(steps, another_comes):
    head = steps.sources.ssms[1]
    head.lookahead, head.reads_states, steps._heads = 1, True, [head]
    rows, path = torch.arange(4.0)[:, None], torch.zeros(1, 1, dtype=torch.int64)
    states = TargetStates(rows, torch.tensor([3]), path)
    start(steps, 0, tokens=range(9))
    steps.budget.draft = False
    draft(steps, a_batch([0], read={0: 0}), states=states)
    steps.budget.draft = True
    batch = a_batch([0], read={0: 4})
    assert draft(steps, batch, states=states)[0] == (True, True)
    assert not head.caught_up and not head.kept
    if another_comes:
        start(steps, 0, tokens=range(9))
    else:
        steps.lessons.learn()
        steps.stop()
    draft(steps, batch, states=states)
    assert head.caught_up == [(0, list(range(9)))]
    assert bool(head.kept) is not another_comes


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("reason", [SCHEDULE, MEASURING, BUDGET])
def test_a_step_without_trees_is_nobodys_to_wait_for(steps, reason, follows):
    steps.drafter.is_following = follows
    steps.budget.grow, steps.budget.draft = reason != MEASURING, reason != BUDGET
    found, stats = draft(steps, a_batch([3, 0]), 0 if reason == SCHEDULE else NODES)
    assert found.shape == (2, NODES) and steps.sizes == {}
    assert stats.reasons == {"r3": reason, "r0": reason}
    assert [ssm.behind for ssm in steps.sources.ssms] == [[3, 0]] * 2
    steps.count()
    steps.lessons.learn()
    assert steps.drafter.num_heard == 0 and not steps.drafter.launched


def test_a_head_that_sits_out_keeps_the_states_that_stay(steps):
    head = steps.sources.ssms[1]
    steps._heads, steps.budget.draft = [head], False
    # The first is inside its prompt; of three rows two of slot 1's stay, two of slot
    # 2's, and one of slot 3's.
    batch = a_batch([0, 1, 2, 3], nodes=2, read={0: 0})
    rows = torch.arange(13.0)[:, None]
    path = torch.tensor([[0, 0], [2, 9], [1, 9], [9, 9]])
    states = TargetStates(rows, torch.tensor([3, 4, 7, 10]), path)
    num_new = torch.tensor([0, 2, 2, 1])
    found = steps.draft(batch, num_new, states, NODES, WorkerStats())
    assert found.shape == (4, NODES) and head.behind == [0, 1, 2, 3]
    start(steps, 2)
    assert not head.kept
    steps.lessons.learn()
    assert head.kept == {0: [0, 1, 2, 3], 1: [4, 6], 3: [10]}
    assert not steps.sources.ssms[0].kept


@pytest.mark.parametrize("grow", [True, False])
def test_a_head_that_has_kept_too_much_reads_it(steps, grow):
    head = steps.sources.ssms[1]
    steps._heads, head.most_kept = [head], 1
    found, _ = draft(steps, a_batch([3, 0]))
    assert found.shape == (2, NODES)
    steps.budget.grow, steps.budget.draft = grow, False
    found, _ = draft(steps, a_batch([3, 0]))
    assert found == (grow, False)
    assert not steps.sources.ssms[0].behind


def test_states_that_are_still_to_come_are_kept_too(steps):
    """A step's are kept when it is learned of, with several in flight."""
    head = steps.sources.ssms[1]
    steps._heads, steps.budget.draft, head.most_kept = [head], False, 4
    path, num_new = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([1, 1])
    states = TargetStates(torch.zeros(2, 1), torch.tensor([0, 1]), path)
    for _ in range(2):
        found = steps.draft(a_batch([3, 0]), num_new, states, NODES, WorkerStats())
        assert found.shape == (2, NODES)
    assert not head.kept
    found = steps.draft(a_batch([3, 0]), num_new, states, NODES, WorkerStats())
    assert found == (True, False)
    steps.lessons.learn()
    assert steps._num_coming == 0 and set(head.kept) == {0, 3}


@pytest.mark.parametrize("lookups", [[], [Lookup()]])
def test_more_requests_than_graphs_hold_wait_for_ssms_alone(steps, lookups):
    steps.sources.lookups = lookups
    batch = a_batch([0, 1, 2, 3])
    found, _ = draft(steps, batch)
    assert found == (True, True) and not steps.drafter.looked_up
    steps.budget.draft = False
    steps.budget.size_of_lookups = 1
    found, stats = draft(steps, batch)
    assert found.shape == (4, NODES)
    if lookups:
        assert steps.drafter.looked_up == [[0, 1, 2, 3]]
        assert steps.sizes == {f"r{slot}": 1 for slot in range(4)}
    else:
        assert steps.sizes == {}
        assert set(stats.reasons.values()) == {BUDGET}
    assert steps.sources.ssms[0].behind == [0, 1, 2, 3]
    assert not steps.drafter.launched


def test_where_no_node_gets_a_row_it_is_the_budgets_choice(steps):
    steps.budget.size = 0
    _, stats = draft(steps, a_batch([3, 0]))  # nothing is found for the second one
    steps.count()
    assert stats.reasons == {"r3": BUDGET, "r0": BUDGET}
    assert not steps.sizes and not any(stats.drafted.values())


@pytest.mark.parametrize("size", [0, 2])
def test_lookups_go_on_without_ssms(steps, size):
    lookup = Lookup()
    steps.sources.lookups = [lookup]
    steps.budget.draft, steps.budget.size_of_lookups = False, size
    steps.drafter.is_following = False
    found, stats = draft(steps, a_batch([3, 0]))
    assert found.shape == (2, NODES) and steps.drafter.looked_up == [[3, 0]]
    assert [ssm.behind for ssm in steps.sources.ssms] == [[3, 0]] * 2
    assert steps.sizes == ({"r3": 2, "r0": 2} if size else {})
    # What it would have brought is learned in any case.
    steps.lessons.learn()
    assert lookup.read == [(3, 23), (0, 20)]
    assert stats.reasons == ({} if size else {"r3": BUDGET, "r0": BUDGET})
    ((_, num_nodes, asks),) = steps.budget.chances
    assert num_nodes.tolist() == [size, size] and not asks
    (known,) = steps.budget.known
    assert known.tolist() == np.float32([[-0.1, -0.2, NONE]] * 2).tolist()
    assert not steps.sources.ssms[0].read
    # Where there are to be no trees, nobody looks anything up.
    steps.budget.grow = False
    draft(steps, a_batch([3, 0]))
    assert len(steps.drafter.looked_up) == 1 and not steps.drafter.launched


def test_lookups_alone_follow_prompts_and_all_else(steps):
    steps.sources.ssms.clear()
    steps.sources.lookups = [lookup := Lookup()]
    start(steps, 0, tokens=range(9))
    # The first ends its prompt, the second does not, the third decodes.
    found, stats = draft(steps, a_batch([0, 1, 3], read={0: 5, 1: 4}))
    assert found.shape == (3, NODES) and steps.drafter.looked_up == [[0, 3]]
    assert steps.sizes == {"r0": NODES, "r3": NODES} and not stats.reasons
    draft(steps, a_batch([1], read={1: 5}))
    steps.budget.grow = False
    found, stats = draft(steps, a_batch([1, 3]))
    assert stats.reasons == {"r1": MEASURING, "r3": MEASURING} and steps.sizes == {}
    assert steps.drafter.looked_up == [[0, 3], [1]]
    steps.lessons.learn()
    assert lookup.read == [(0, 20), (3, 23), (1, 21)]
    # Nobody is asked for what there is none to do.
    assert not steps.budget.unread and not steps.drafter.launched
    assert not steps.budget.drafts_timed
    assert [asks for *_, asks in steps.budget.chances] == [False, False]


def test_lookups_hear_what_they_have_looked_up_beside_ssms(steps):
    steps.sources.lookups = [Lookup()]
    draft(steps, a_batch([3, 0]))
    steps.lessons.learn()
    assert steps.sources.lookups[0].read == [(3, 23), (0, 20)]
    (known,) = steps.budget.known
    assert known[0].tolist() == [-0.5, -0.5, NONE] and known.shape == (2, NODES)


def test_steps_and_drafts_that_follow_each_other_are_timed(steps):
    draft(steps, a_batch([3, 0]))
    draft(steps, a_batch([3, 0], NODES))
    steps.budget.draft = False
    draft(steps, a_batch([3, 0], NODES))
    draft(steps, a_batch([3, 0]))
    draft(steps, a_batch([3, 0]))
    # Nobody knows what ran before the first step; the last two are not yet told.
    assert steps.budget.drafts_timed == [(2, 20, 4, True)] * 2
    assert steps.budget.steps == [(8, True)] * 2
    start(steps, 1)
    draft(steps, a_batch([3, 0, 1]))
    draft(steps, a_batch([3, 0, 1]))
    draft(steps, a_batch([3, 0, 1]))
    # A step that a request has begun in is nobody's either.
    steps.lessons.learn()
    assert steps.budget.steps[2:] == [(2, False)] * 2 + [(3, False)] * 2
