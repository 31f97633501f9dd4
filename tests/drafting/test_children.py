"""Children are the likeliest tokens, or drawn from the distribution they keep."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_specinfer.drafting.children import (
    FLAT_ACCEPTANCE,
    ChildChooser,
    DraftRows,
    coupled_children,
)
from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.noise import gumbel_noise
from vllm_specinfer.options import MAX_CANDIDATES, MAX_NUM_SPECULATIVE_TOKENS
from vllm_specinfer.tree.proposals import NO_DRAW
from vllm_specinfer.tree.token_tree import ROOT

VOCAB = 6
LOGITS = np.array([1.5, 1.1, 0.4, 0.0, -0.5, -1.0], np.float32)
TOKENS = np.array([3, 9, 4, 1, 12, 7])
Q = np.exp(LOGITS) / np.exp(LOGITS).sum()


def rows(count, temperature=1.0, **params):
    values = {"top_k": 1000, "top_p": 1.0, "min_p": 0.0, **params}
    return DraftRows(
        seeds=np.arange(count) * 7919 + 11,
        roots=np.full(count, 40),
        depths=np.zeros(count, np.int64),
        nodes=np.full(count, ROOT),
        temperatures=np.full(count, temperature, np.float32),
        **{name: np.full(count, value) for name, value in values.items()},
    )


def choose(rule, k, draft_rows, source=0):
    count = len(draft_rows.seeds)
    logprobs = np.tile(np.log(Q).astype(np.float32), (count, 1))
    tokens = np.tile(TOKENS, (count, 1))
    return ChildChooser(rule, source).choose(logprobs, tokens, k, draft_rows)


def close(counts, expected):
    """Chi-square over outcomes at about five sigma."""
    expected = np.asarray(expected) * np.sum(counts)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return statistic < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("rule", ["coupled", "mss", "rrs", "naive"])
def test_greedy_rows_get_the_likeliest(rule):
    found = choose(rule, 3, rows(2, temperature=0.0))
    assert found.tokens.tolist() == [TOKENS[:3].tolist()] * 2
    assert found.scores == pytest.approx(np.log(Q[:3])[None].repeat(2, 0), abs=1e-6)
    assert found.draws is None


@pytest.mark.parametrize("rule", ["mss", "rrs"])
def test_pairs_of_draws_have_their_joint_distribution(rule):
    draws = choose(rule, 2, rows(40_000)).draws
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (draws.places[:, 0], draws.places[:, 1]), 1)
    joint = np.outer(Q, Q)
    if rule == "rrs":
        joint = joint / (1 - Q)[:, None]
        assert not np.diag(counts).any()
        off = ~np.eye(VOCAB, dtype=bool)
        joint, counts = joint[off], counts[off]
    assert close(counts.ravel(), joint.ravel())
    assert draws.q[0, 0] == pytest.approx(Q, abs=1e-6)
    if rule == "rrs":
        left = np.where(np.arange(VOCAB) == draws.places[0, 0], 0, Q)
        assert draws.q[0, 1] == pytest.approx(left / left.sum(), abs=1e-6)
    else:
        assert (draws.q[0, 1] == draws.q[0, 0]).all()
    assert (draws.tokens[0] == TOKENS).all()


def test_places_steps_requests_and_sources_draw_independently():
    one = rows(20_000)
    elsewhere = [
        one.below(np.arange(20_000), 0, np.zeros(20_000, int)),
        DraftRows(**{**vars(one), "roots": one.roots + 1}),
        DraftRows(**{**vars(one), "seeds": one.seeds + 1}),
    ]
    first = choose("mss", 1, one).draws.places[:, 0]
    for other, source in [*((e, 0) for e in elsewhere), (one, 1)]:
        second = choose("mss", 1, other, source).draws.places[:, 0]
        counts = np.zeros((VOCAB, VOCAB))
        np.add.at(counts, (first, second), 1)
        assert close(counts.ravel(), np.outer(Q, Q).ravel())


def test_equal_draws_share_a_child_but_both_are_kept():
    found = choose("mss", 3, rows(500))
    for f in range(500):
        places = found.draws.places[f].tolist()
        assert NO_DRAW not in places
        for j, place in enumerate(places):
            assert np.isfinite(found.scores[f, j]) == (place not in places[:j])


@pytest.mark.parametrize("rule", ["mss", "rrs"])
def test_a_draw_is_worth_the_chance_that_its_test_comes_and_accepts(rule):
    found = choose(rule, 3, rows(200))
    assert np.exp(found.scores).sum(axis=1).max() < 1
    for scores, places, q in zip(
        found.scores, found.draws.places, found.draws.q, strict=True
    ):
        rejected = 1.0
        for j, place in enumerate(places.tolist()):
            if place in places[:j]:
                continue  # it shares the first one's node
            accepts = FLAT_ACCEPTANCE + (1 - FLAT_ACCEPTANCE) * q[j, place]
            assert scores[j] == pytest.approx(np.log(rejected * accepts), abs=1e-5)
            rejected *= 1 - accepts


def test_draws_without_replacement_end_when_nothing_is_left():
    found = choose("rrs", 4, rows(50, top_k=2))
    assert (found.draws.places[:, 2:] == NO_DRAW).all()
    assert set(found.draws.places[:, :2].ravel()) == {0, 1}
    assert np.isneginf(found.scores[:, 2:]).all()


@pytest.mark.parametrize(
    "params",
    [{"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.6}, {"min_p": 0.3}],
)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_requests_parameters(params, temperature):
    q = choose("mss", 1, rows(1, temperature, **params)).draws.q[0, 0]
    logits = torch.from_numpy(LOGITS / np.float32(temperature))[None].clone()
    if "min_p" in params:
        probs = logits.softmax(-1)
        logits[probs < params["min_p"] * probs.max()] = -torch.inf
    k, p = params.get("top_k"), params.get("top_p")
    wanted = apply_top_k_top_p(
        logits,
        None if k is None else torch.tensor([k]),
        None if p is None else torch.tensor([p]),
    ).softmax(-1)[0]
    assert q == pytest.approx(wanted.numpy(), abs=1e-6)


def test_coupled_children_share_the_noise_of_plain_decoding():
    draft_rows = rows(200, temperature=0.5)
    draft_rows = draft_rows.below(np.arange(200), 3, np.arange(200))
    found = choose("coupled", 2, draft_rows)
    assert found.draws is None
    for f in range(200):
        noise = gumbel_noise(int(draft_rows.seeds[f]), 43, TOKENS)
        order = np.argsort(-(LOGITS / 0.5 + noise))
        assert found.tokens[f].tolist() == TOKENS[order[:2]].tolist()
        assert found.scores[f, 0] > found.scores[f, 1]


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_of_coupled_children_equals_its_definition(seed):
    rng = np.random.default_rng(seed)
    count, size = 300, 40
    logprobs = rng.standard_normal((count, size)) * rng.choice(
        [0.5, 3.0, 30.0], (count, 1)
    )
    logprobs = -np.sort(-logprobs).astype(np.float32)
    tokens = np.argsort(rng.random((count, 50_000)), axis=1)[:, :size]
    given = (
        logprobs,
        tokens,
        rng.integers(-(1 << 63), 1 << 63, count),
        rng.integers(0, 1 << 31, count),
        rng.choice([0.3, 1.0, 2.0], count).astype(np.float32),
        rng.choice([1, 2, 10, 50_000], count).astype(np.int32),
        rng.choice([0.2, 0.9, 1.0], count).astype(np.float32),
        rng.choice([0.0, 0.05, 0.5], count).astype(np.float32),
    )
    for k in (1, 4, size):
        scores, chosen = coupled_children(*given, k)
        found, ours = extension.load().coupled_children(*given, k)
        assert np.array_equal(np.isfinite(found), np.isfinite(scores))
        some = np.isfinite(scores)
        assert found[some] == pytest.approx(scores[some], abs=1e-4)
        assert np.array_equal(ours[some], chosen[some])
    assert (some.sum(axis=1) == 1).any() and some.all(axis=1).any()


def test_no_two_nodes_of_a_tree_share_their_draws():
    nodes = np.array([ROOT, 0, 256, 65535, 65792, MAX_CANDIDATES - 1])
    of_tree = replace(rows(len(nodes)), seeds=np.full(len(nodes), 3), nodes=nodes)
    found = ChildChooser("mss")._uniforms(of_tree, MAX_NUM_SPECULATIVE_TOKENS)
    assert len(np.unique(found)) == found.size
