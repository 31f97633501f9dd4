"""Whom a step asks, and whose draws stand below which node."""

import copy
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: F401  before TreeWorker
from vllm.v1.worker.gpu_worker import Worker

from tests.token_trees import paths_in
from vllm_specinfer.drafting.lookup import NO_TOKENS, LookupSource
from vllm_specinfer.drafting.source import Proposal
from vllm_specinfer.drafting.sources import Decision, SourceSet
from vllm_specinfer.drafting.suffix import TEXT_END, Suffixes
from vllm_specinfer.options import BestFirstTree, SuffixSource
from vllm_specinfer.scheduling.budget import Budget
from vllm_specinfer.scheduling.calibration import Calibration
from vllm_specinfer.scheduling.exploration import PlainSteps
from vllm_specinfer.scheduling.lessons import Lessons
from vllm_specinfer.scheduling.levels import Levels
from vllm_specinfer.scheduling.load_budget import LoadBudget
from vllm_specinfer.scheduling.predictor import Predictor
from vllm_specinfer.scheduling.step_stats import BUDGET, MEASURING, NO_CANDIDATES
from vllm_specinfer.speculator import TreeSpeculator
from vllm_specinfer.tree.candidates import NO_TOKEN, Candidates
from vllm_specinfer.tree.proposals import certain
from vllm_specinfer.tree.token_tree import ROOT
from vllm_specinfer.worker import TreeWorker

SHAPE = BestFirstTree(4, 4, 0.05)
STEP = SimpleNamespace(
    growing=np.array([0]),
    slots=np.array([7]),
    num_tokens=np.array([3]),
    ended=False,
    tests_draws=False,
)


# To nobody.
NOTHING = Proposal(
    Candidates(
        np.zeros((0, 3), np.int64),
        np.zeros((0, 3), np.int32),
        np.zeros((0, 3), np.float32),
    ),
    [],
)


class Chain:
    """Proposes one chain of tokens, each with the same chance after the one before."""

    def __init__(self, tokens, chance, least=SHAPE.min_probability):
        self.least = np.log(least) if least else -np.inf
        self.tokens, self.chance, self.asked = tokens, chance, []
        self.calibration, self.work = Calibration(), (0, 0)
        self.predictor = self.on_device = None
        self.behind = 0
        self.ssm = self.kv = self

    def num_unread(self, slots, num_tokens):
        return len(self.tokens)

    def skip(self, step):
        pass

    def is_far_behind(self, step):
        return self.behind > 0

    def read_some(self, step):
        self.behind -= 1

    def propose(self, step):
        n = len(self.tokens)
        chance = self.calibration.corrected(np.log(self.chance))
        candidates = Candidates(
            np.array([self.tokens]),
            np.arange(-1, n - 1, dtype=np.int32)[None],
            (chance * np.arange(1, n + 1)[None]).astype(np.float32),
        )
        draws = {
            node: certain(token)
            for node, token in zip(range(-1, n - 1), self.tokens, strict=True)
        }
        return Proposal(candidates, [draws])

    def begin(self, step, least, most):
        self.asked.append(np.exp(least))
        self.most = most
        rows, levels = self.work
        self.work = rows + len(self.tokens), levels + 1
        proposal = self.propose(step)
        return lambda: proposal


def propose(lookups, ssms, num_nodes, tree=SHAPE, step=STEP):
    drafts = SourceSet(lookups, ssms, tree, num_nodes, Budget()).propose(step)
    (tree,) = drafts.trees.each()
    return tree, drafts.draws[0]


def test_the_budget_hears_what_the_ssms_have_not_read_and_what_lookups_found():
    budget, told = Budget(), []
    budget.drafts = lambda *args: told.append(args)
    ssms = [Chain([1, 2], 0.9), Chain([1, 2, 3], 0.9)]
    SourceSet([Chain([5, 6], 0.1)], ssms, SHAPE, 3, budget).propose(STEP)
    SourceSet([], ssms, SHAPE, 3, budget).propose(STEP)
    (*first, known, most), second = told
    assert first == [1, 5] and second == (1, 5, None, 3)
    assert np.exp(known) == pytest.approx(np.array([[0.1, 0.01]])) and most == 3


def test_ssms_that_sat_out_for_long_read_in_pieces_before_they_are_asked():
    budget, asked = Budget(), []
    budget.drafts = lambda *args: asked.append(args) or True
    near, far = Chain([1], 0.9), Chain([2], 0.9)
    far.behind = 2
    sources = SourceSet([], [near, far], SHAPE, 3, budget)
    for left in (1, 0):
        drafts = sources.propose(STEP)
        assert drafts.reasons == {0: BUDGET} and drafts.work is None
        assert far.behind == left and not near.asked
    assert sources.propose(STEP).counts == [1, 1]
    # That it pays was asked once, not while they read.
    assert len(asked) == 1
    sources.propose(STEP)
    assert len(asked) == 2


@pytest.mark.parametrize("reads_states", [False, True])
@pytest.mark.parametrize("decided", [None, Decision(grows=True, asks=True)])
def test_ssms_read_nothing_of_requests_that_have_ended(decided, reads_states):
    """Nobody waits for it; heads alone could not read it later."""
    asked = []
    ssm = SimpleNamespace(
        ssm=SimpleNamespace(
            reads_states=reads_states,
            kv=SimpleNamespace(num_unread=lambda *_: 2),
            is_far_behind=lambda _: asked.append("far") or False,
            skip=lambda _: asked.append("skip"),
        ),
        least=-np.inf,
        predictor=None,
        calibration=Calibration(),
        work=(0, 0),
        begin=lambda *_: asked.append("begin") or (lambda: NOTHING),
    )
    sources = SourceSet([], [ssm], SHAPE, 3, Budget())
    for ended in (False, True):
        # The other one is inside a prompt that goes on.
        none = np.zeros(0, np.int64)
        step = SimpleNamespace(**{**vars(STEP), "growing": none, "ended": ended})
        drafts = sources.propose(step, decided=decided)
        skips = ended and not reads_states
        assert asked == (["skip"] if skips else ["far", "begin"])
        assert (drafts.work is None) == skips
        asked.clear()
    # Nor does anybody go on reading what one of them has begun to.
    sources.reading = True
    sources.propose(step, decided=decided)
    assert not sources.reading


def test_smaller_trees_are_asked_for_where_a_step_takes_no_larger_ones():
    budget, told = Budget(), []
    budget.drafts = lambda *args: bool(told.append(args)) or True
    budget.least_score = lambda *args: told.append(args) or -np.inf
    ssm = Chain([1, 2, 3], 0.9)
    drafts = SourceSet([], [ssm], SHAPE, 3, budget).propose(STEP, most=2)
    assert [args[-1] for args in told] == [2, 2] and ssm.most == 2
    assert drafts.trees.tokens.tolist() == [[1, 2, NO_TOKEN]]


def test_an_ssm_is_not_asked_where_a_lookup_fills_the_tree_surely():
    ssm = Chain([1, 2], 0.9)
    tree, _ = propose([Chain([5, 6, 7], 0.9)], [ssm], 3)
    assert tree.tokens.tolist() == [5, 6, 7] and not ssm.asked
    tree, _ = propose([Chain([5, 6, 7], 0.9)], [ssm], 4)
    assert ssm.asked  # three sure nodes leave room for one more
    assert tree.tokens.tolist() == [5, 1, 6, 2]  # ties: the lookup's first


def test_an_ssm_is_asked_for_draws_whatever_lookups_know():
    """Else the requests beside a sampled one would decide what it is tested with."""
    for temperature in (0.0, 0.7):
        temperatures = np.array([temperature])
        roots = SimpleNamespace(temperatures=temperatures, sampled=temperature > 0)
        step = SimpleNamespace(**{**vars(STEP), "tests_draws": True, "roots": roots})
        ssm = Chain([1, 2], 0.9)
        propose([Chain([1, 2, 3], 0.9)], [ssm], 3, step=step)
        assert bool(ssm.asked) is (temperature > 0)


def test_an_ssm_is_asked_for_nothing_but_sure_nodes():
    tree, _ = propose([], [Chain([1, 2, 3], 0.9, least=0.8)], 3)
    assert tree.tokens.tolist() == [1, 2]


def test_what_one_ssm_would_drop_another_may_keep():
    ssms = [Chain([1, 2, 3], 0.9, least=0.8), Chain([4, 5, 6], 0.8, least=0.6)]
    tree, _ = propose([], ssms, 6)
    assert [ssm.asked[0].tolist() for ssm in ssms] == [
        [pytest.approx(0.8)],
        [pytest.approx(0.6)],
    ]
    assert tree.tokens.tolist() == [1, 2, 4, 3, 5]


@pytest.mark.parametrize(("temperature", "expected"), [(0.0, []), (1.0, [1])])
def test_draws_are_tested_however_unlikely_they_are(temperature, expected):
    """Else only hopeful ones would be, and texts would have another distribution."""
    roots = SimpleNamespace(temperatures=np.array([temperature]))
    step = SimpleNamespace(**{**vars(STEP), "tests_draws": True, "roots": roots})
    tree, draws = propose([], [Chain([1, 2], 0.45, least=0.5)], 3, step=step)
    assert tree.tokens.tolist() == expected and ROOT in draws


def test_an_ssm_hears_what_will_be_left_out_anyway():
    ssm = Chain([1], 0.5)
    propose([Chain([5, 6, 7], 0.6)], [ssm], 2)
    assert ssm.asked[0] == pytest.approx([0.36], abs=1e-6)
    propose([Chain([5, 6, 7], 0.6)], [ssm], 9)
    assert ssm.asked[1] == pytest.approx([0.05], abs=1e-6)


def test_the_draws_of_all_sources_stand_below_the_node_they_share():
    tree, draws = propose([], [Chain([1, 2, 3], 0.9), Chain([1, 4], 0.5)], 5)
    paths = {path: i for i, path in enumerate(paths_in(tree))}
    assert set(paths) == {(1,), (1, 2), (1, 2, 3), (1, 4)}
    drawn = {
        node: [int(d.tokens[0, 0]) for d in of_node] for node, of_node in draws.items()
    }
    assert drawn == {ROOT: [1, 1], paths[(1,)]: [2, 4], paths[(1, 2)]: [3]}


def test_draws_below_a_node_that_is_left_out_are_forgotten():
    tree, draws = propose([], [Chain([1, 2, 3], 0.5), Chain([4, 6], 0.9)], 2)
    assert tree.tokens.tolist() == [4, 6]
    assert set(draws) == {ROOT, 0}


def test_an_expansion_keeps_unlikely_nodes():
    ssms = [Chain([1, 2], 0.1, least=0), Chain([3], 0.1, least=0)]
    tree, _ = propose([], ssms, 3)
    assert sorted(tree.tokens.tolist()) == [1, 2, 3]


class Learning(Budget):
    """Admits everything, and learns whom to believe."""

    learns = True


def test_a_source_that_is_always_wrong_loses_its_nodes_to_one_that_is_right():
    liar, honest = Chain([1, 2], 0.9), Chain([3, 4], 0.5)
    sources = SourceSet([], [liar, honest], SHAPE, 2, Learning())
    kept = []
    for _ in range(300):
        (tree,) = sources.propose(STEP).trees.each()
        kept.append(tree.tokens.tolist())
        paths = paths_in(tree)
        sources.experience.observe(7, [i for i, p in enumerate(paths) if p[0] == 3], 9)
    assert kept[0] == [1, 2] and kept[-1] == [3, 4]
    # What the honest source calls one half turned out sure.
    assert honest.calibration.corrected(np.log(0.5)) > np.log(0.75)
    assert liar.calibration.corrected(np.log(0.9)) < np.log(0.5)
    sources.experience.observe(7, [0], 9)  # no tree stands there any more


class Words:
    """A lookup that knows what it is told."""

    def __init__(self, nodes):
        self.nodes = nodes

    def start(self, slot):
        pass

    def find(self, slot, tokens, alone):
        return self.nodes


def test_a_lookups_predictor_learns_from_its_own_nodes_that_were_tested():
    step = SimpleNamespace(
        **vars(STEP),
        all_token_ids=np.zeros((8, 9), np.int32),
        roots=SimpleNamespace(temperatures=np.array([0.7])),
    )
    nodes = [(ROOT, 1, 0.5), (0, 2, 0.8), (ROOT, 3, 0.4), (2, 4, 0.9), (0, 5, 0.15)]
    nodes.append((1, 6, 0.7))
    words, ssm = LookupSource(Words(nodes)), Chain([9, 8], 0.5)
    words.predictor, seen = Predictor(), []
    words.predictor.observe = lambda *args: seen.append(args)
    sources = SourceSet([words], [ssm], SHAPE, 8, Learning())
    (tree,) = sources.propose(step).trees.each()
    paths = {path: i for i, path in enumerate(paths_in(tree))}
    found = {(1,), (1, 2), (1, 2, 6), (1, 5), (3,), (3, 4), (9,), (9, 8)}
    assert set(paths) == found
    sources.experience.observe(7, [paths[1,], paths[1, 2]], 9)
    ((slot, features, right),) = seen
    expected = {
        (np.log(0.5), 0, 0, 1): True,
        (np.log(0.8), np.log(0.5), 0, 2): True,
        (np.log(0.7), np.log(0.4), 0, 3): False,
        (np.log(0.4), 0, 1, 1): False,
        (np.log(0.15), np.log(0.5), 1, 2): False,
    }
    order, other = np.argsort(-features[:, 0]), sorted(expected, reverse=True)
    np.testing.assert_allclose(features[order][:, :4], other, atol=1e-6)
    np.testing.assert_allclose(features[:, 4:], [[0.7, 0.5]] * 5, atol=1e-6)
    assert slot == 7 and right[order].tolist() == [expected[key] for key in other]
    # The SSM has none: its chances are corrected by one number.
    assert ssm.calibration.distrust > 0 == words.calibration.distrust


def test_guesses_of_a_slots_last_request_are_forgotten():
    source = LookupSource(Words([]))
    source.predictor = Predictor()
    sources = SourceSet([source], [], SHAPE, 4, Learning())
    source.predictor.guesses.observe(3, np.array([True]))
    sources.start(3, None)
    assert source.predictor.guesses.recent([3]) == 0.5


def test_a_shared_node_counts_for_the_first_source():
    sources = SourceSet([Chain([1, 2], 0.5)], [Chain([1, 3], 0.9)], SHAPE, 3, Budget())
    drafts = sources.propose(STEP)
    (tree,) = drafts.trees.each()
    nodes = {path: i for i, path in enumerate(paths_in(tree))}
    assert set(nodes) == {(1,), (1, 2), (1, 3)}
    assert drafts.counts == [2, 1] and not drafts.reasons
    sources_of = sources.experience.sources_of_nodes()
    sources.experience.observe(7, [nodes[1,], nodes[1, 3]], 9)
    sources.experience.observe(7, [nodes[1,]], 9)  # no tree stands there any more
    assert sources_of(7, [nodes[1,], nodes[1, 3]]) == [0, 1]
    assert sources_of(7, []) == sources_of(8, []) == []


class Stingy(Budget):
    """Says no where it is told to."""

    def __init__(self, grows=True, drafts=True, least=-np.inf):
        self.grows = lambda num_reqs: grows
        self.drafts = lambda *args: drafts
        self.least_score = lambda *args: least


def test_nodes_without_rows_are_not_tested():
    """A full step or a full K/V cache has cut them off."""
    ssm, budget = Chain([1, 2, 3], 0.9), Budget()
    budget.learns = True
    sources = SourceSet([], [ssm], SHAPE, 3, budget)
    for num_rows, tested in ((3, 2), (1, 1), (0, 0)):
        observed = []
        ssm.calibration.observe = lambda *args, seen=observed: seen.append(args)
        sources.propose(STEP)
        sources.experience.observe(7, [0][:num_rows], num_rows)
        ((expected, hits),) = observed
        # The root's child, and the child of that, which was wrong.
        assert expected == pytest.approx(0.9 * tested)
        assert hits == min(num_rows, 1)


def test_a_source_that_was_wrong_for_long_is_asked_again():
    """Else it would be silent for good, however right it would be."""
    ssm, budget = Chain([1, 2, 3], 0.9), Budget()
    budget.learns = True
    sources = SourceSet([], [ssm], SHAPE, 3, budget)

    def has_nodes(num_steps, accepted):
        found = []
        for _ in range(num_steps):
            sources.experience.forgive()
            (tree,) = sources.propose(STEP).trees.each()
            found.append(len(tree) > 0)
            sources.experience.observe(7, accepted[: len(tree)], 3)
        return found

    wrong = has_nodes(3000, [])
    assert wrong[0] and 0 < sum(wrong[1000:]) < 200
    assert all(has_nodes(1000, [0, 1, 2])[-500:])


def test_drafts_say_what_the_ssms_did_for_them():
    lookups, ssms = [Chain([5], 0.1)], [Chain([1, 2], 0.9), Chain([1, 2, 3], 0.9)]
    sources = SourceSet(lookups, ssms, SHAPE, 3, Budget())
    assert [sources.propose(STEP).work for _ in range(2)] == [(5, 2), (5, 2)]
    for others, budget in ((ssms, Stingy(drafts=False)), ([], Budget())):
        sources = SourceSet(lookups, others, SHAPE, 3, budget)
        assert sources.propose(STEP).work is None


@pytest.mark.parametrize(
    ("chance", "budget", "reason"),
    [
        (0.5, Stingy(grows=False), MEASURING),
        (0.5, Stingy(drafts=False), BUDGET),
        (0.5, Stingy(least=np.inf), BUDGET),
        (0.01, Stingy(), NO_CANDIDATES),
        (0.01, Stingy(least=np.inf), NO_CANDIDATES),
    ],
)
def test_an_empty_tree_has_a_reason(chance, budget, reason):
    ssm = Chain([1, 2], chance)
    drafts = SourceSet([], [ssm], SHAPE, 3, budget).propose(STEP)
    assert drafts.counts == [] and drafts.reasons == {0: reason}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_text_is_kept_once_its_request_has_ended_not_where_it_begins_again(ahead):
    """As a session's next turn does, and what was preempted."""
    suffixes, kept, left = Suffixes(SuffixSource(max_tokens=100), 2, 3), [], []
    lookup, text = LookupSource(suffixes), torch.arange(9, dtype=torch.int32)
    lookup.on_device = SimpleNamespace(start=lambda slot: None, end=kept.append)
    speculator = TreeSpeculator.__new__(TreeSpeculator)
    speculator._ahead = None
    if ahead:
        speculator._ahead = SimpleNamespace(leave=lambda *call: left.append(call))
    speculator._req_states = SimpleNamespace(
        req_id_to_index={"a": 1}, all_token_ids=SimpleNamespace(gpu=text.expand(2, 9))
    )
    speculator.host_steps = SimpleNamespace(num_tokens=[0, 9])
    speculator.sources = SourceSet([lookup], [], SHAPE, 3, Budget())
    speculator._asked = None

    class Runs(Worker):
        def execute_model(self, output):
            speculator.end_request("a")

    class Run(TreeWorker, Runs):
        pass

    worker = Run.__new__(Run)
    worker.vllm_config = mock.MagicMock()
    worker.vllm_config.scheduler_config.async_scheduling = False
    worker.model_runner = mock.MagicMock(speculator=speculator)
    for finished in (), (), ("a", "b"):
        lookup.start(1, SimpleNamespace())
        suffixes.read(1, text.numpy())
        none = SimpleNamespace(req_ids=[], new_block_ids=[])
        worker.execute_model(
            SimpleNamespace(finished_req_ids=set(finished), scheduled_cached_reqs=none)
        )
        if not finished:
            assert not kept
            lookup.start(0, SimpleNamespace())
            assert not suffixes.find(0, np.array([20, 4, 5, 6], np.int32))
            lookup.end(0, NO_TOKENS)
    # With what the device knows alone the host keeps what it hears until the next one.
    assert kept == [1] * ahead
    assert left == [(1, False), (1, False), (1, True)] * ahead
    lookup.start(1, SimpleNamespace())
    assert suffixes._past[0].tokens.tolist() == [*range(9), TEXT_END]


def test_what_is_learned_of_made_up_requests_is_forgotten():
    """vLLM's warm-up: its steps compile kernels, its texts are nobody's."""
    suffixes, budget = Suffixes(SuffixSource(max_tokens=100), 1, 3), LoadBudget(3)
    lookup = LookupSource(suffixes)
    lookup.predictor = Predictor()
    ssm, levels = Chain([1, 2], 0.9), Levels([1], [1, 2])
    ssm.on_device = SimpleNamespace(levels=levels)
    sources = SourceSet([lookup], [ssm], SHAPE, 3, budget)
    before, states = sources.experience.learned(), copy.deepcopy(vars(budget))
    lessons = Lessons()

    class Starts(Worker):
        def compile_or_warm_up_model(self):
            budget.grows(1)
            budget.observe_step(1, 9.0, False)
            lessons.add(lambda: budget.observe_draft(1, 2, 2, 7.0))
            lookup.calibration.observe(2.0, 0)
            levels.observe(np.zeros((1, 2)))
            lookup.predictor.guesses.start(3)
            for text in np.arange(9), np.array([1, 2, 3]):
                lookup.start(0, None)
                found = suffixes.find(0, text)
            assert found
            assert sources.experience.learned() != before
            self._maybe_activate_jit_monitor()
            return "times"

        def _maybe_activate_jit_monitor(self):
            again.append("after the last warm-up")

    again = []

    class Started(TreeWorker, Starts):
        def _warm_up_drafting(self):
            again.append(budget.observe_step(2, 8.0, True))

        def _warm_up_draws(self):
            again.append("draws")

    worker = Started.__new__(Started)
    worker.vllm_config = SimpleNamespace(
        kernel_config=SimpleNamespace(enable_jit_warmup=True)
    )
    speculator = SimpleNamespace(
        sources=sources, learn=lessons.learn, drafts_ahead=True
    )
    worker.model_runner = SimpleNamespace(speculator=speculator)
    assert worker.compile_or_warm_up_model() == "times"
    assert again == [None, "draws", "after the last warm-up"]
    lessons.learn()
    assert sources.experience.learned() == before and levels._chances.value is None
    assert budget._draft_size.value is None
    assert not suffixes.find(0, np.array([1, 2, 3]))
    plain = budget._plain_steps, states["_plain_steps"], PlainSteps()
    assert vars(plain[0]) == vars(plain[1]) == vars(plain[2])
    assert budget.grows(1) is LoadBudget(3).grows(1)
