"""Grown trees are the N likeliest nodes of what the SSM proposed."""

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.token_trees import check, depths_of, path_to
from vllm_specinfer.drafting.growth import EVERYTHING, TreeGrowth
from vllm_specinfer.kernels.cpu.trees import CompiledGrowth, compiled_steps
from vllm_specinfer.options import BestFirstTree, ExpansionTree
from vllm_specinfer.scheduling.budget import Worth
from vllm_specinfer.tree.candidates import NO_TOKEN
from vllm_specinfer.tree.token_tree import ROOT, TokenTree

VOCAB = 11
PLENTY = np.array([1000])


def ssm(path, seed=0):
    """Log-probabilities of a toy SSM that depends on the whole path."""
    return logprobs_by((seed, len(path), *path))


@lru_cache(maxsize=100_000)
def logprobs_by(seeds):
    rng = np.random.default_rng(seeds)
    logits = rng.normal(size=VOCAB) * 2
    return logits - np.log(np.exp(logits).sum())


def top(logprobs, k):
    order = np.argsort(-logprobs, kind="stable")[:k]
    return logprobs[order], order


class Growth:
    """The definition and its compiled twin, which must agree all the way."""

    def __init__(self, *args):
        self._both = TreeGrowth(*args), CompiledGrowth(*args)

    @property
    def num_children(self):
        count, same = (growth.num_children for growth in self._both)
        assert count == same
        return count

    def extend(self, logprobs, tokens):
        found = [growth.extend(logprobs, tokens) for growth in self._both]
        if None in found:
            assert found == [None, None]
            return None
        for values, same in zip(*(vars(f).values() for f in found), strict=True):
            assert np.array_equal(values, same)
            assert np.asarray(values).dtype == np.asarray(same).dtype
        return found[0]

    def finish(self):
        found, same = (growth.finish() for growth in self._both)
        assert (found.scores == same.scores).all()
        real = np.isfinite(found.scores)
        assert (found.tokens[real] == same.tokens[real]).all()
        assert (found.parents[real] == same.parents[real]).all()
        return found


def grow(tree, num_nodes, seeds=(0,), capacity=None, max_depth=None, worth=EVERYTHING):
    """Run the level loop; returns the trees and the frontiers as lists of paths."""
    r = len(seeds)
    least = getattr(tree, "min_probability", 0)
    least = np.log(least) if least else -np.inf
    growth = Growth(
        tree,
        num_nodes,
        np.full(r, 1000) if capacity is None else capacity,
        np.full(r, 1000) if max_depth is None else max_depth,
        np.full(r, least),
        worth,
    )
    paths = [[] for _ in seeds]
    requests = list(range(r))
    by_scratch = [{} for _ in seeds]
    levels = []
    candidates = []
    while True:
        found = [
            top(ssm(path, seeds[q]), growth.num_children)
            for q, path in zip(requests, paths, strict=True)
        ]
        logprobs = np.array([f[0] for f in found], np.float32)
        frontier = growth.extend(logprobs, np.array([f[1] for f in found]))
        if frontier is None:
            break
        requests = frontier.requests.tolist()
        assert requests == sorted(requests)
        # The scratch slots a node sees must spell its own path.
        paths = []
        for q, token, slot, bits in zip(
            requests,
            frontier.tokens,
            frontier.scratch,
            frontier.ancestor_bits,
            strict=True,
        ):
            by_scratch[q][int(slot)] = int(token)
            seen = [
                w * 64 + b
                for w, word in enumerate(bits.view(np.uint64))
                for b in range(64)
                if int(word) >> b & 1
            ]
            assert seen[-1] == slot
            paths.append([by_scratch[q][s] for s in seen])
            assert len(paths[-1]) == frontier.depth
        candidates += zip(requests, frontier.nodes.tolist(), paths, strict=True)
        levels.append([(q, tuple(p)) for q, p in zip(requests, paths, strict=True)])
    grown = growth.finish().best(num_nodes, least)
    trees = [TokenTree(t, p) for t, p in zip(grown.tokens, grown.parents, strict=True)]
    for q, candidate, path in candidates:
        known = [path_to(trees[q], i) for i in range(len(trees[q]))]
        place = grown.places[q, candidate]
        assert known[place] == path if place < num_nodes else path not in known
    return trees, levels


def logprob_of(path, seed):
    return sum(ssm(path[:i], seed)[t] for i, t in enumerate(path))


def all_candidates(max_depth, width, seed):
    """Every path of top-`width` children, by brute force."""
    frontier, found = [[]], []
    for _ in range(max_depth):
        frontier = [[*p, int(t)] for p in frontier for t in top(ssm(p, seed), width)[1]]
        found += frontier
    return found


@pytest.mark.parametrize("num_nodes", [1, 3, 8, 12])
@pytest.mark.parametrize("seed", range(5))
def test_best_first_keeps_the_likeliest_nodes_of_the_full_search(num_nodes, seed):
    width, depth = 12, 4  # as wide as N: the width limit never binds
    (tree,), _ = grow(BestFirstTree(depth, width, 0), num_nodes, (seed,))
    check(tree)
    paths = all_candidates(depth, min(VOCAB, width), seed)
    best = sorted(paths, key=lambda p: -logprob_of(p, seed))[:num_nodes]
    assert [path_to(tree, i) for i in range(num_nodes)] == best


def test_expansion_has_the_papers_level_sizes():
    (tree,), levels = grow(ExpansionTree((1, 1, 3, 1, 1, 1, 1, 1)), 20)
    check(tree)
    assert np.bincount(depths_of(tree)).tolist() == [0, 1, 1, 3, 3, 3, 3, 3, 3]
    assert [len(level) for level in levels] == [1, 1, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(
    "shape, num_nodes",
    [(ExpansionTree((2, 2, 1)), 10), (BestFirstTree(4, 3, 0), 9)],
)
def test_requests_grow_independently_of_their_batch(shape, num_nodes):
    seeds = (3, 1, 4)
    together, _ = grow(shape, num_nodes, seeds)
    for tree, seed in zip(together, seeds, strict=True):
        (alone,), _ = grow(shape, num_nodes, (seed,))
        assert (tree.tokens == alone.tokens).all()
        assert (tree.parents == alone.parents).all()


def test_full_scratch_and_last_positions_stop_expansion_not_the_tree():
    shape = BestFirstTree(4, 3, 0)
    trees, levels = grow(
        shape, 9, (3, 1, 4), np.array([0, 2, 1000]), np.array([9, 9, 1])
    )
    expanded = [path for level in levels for path in level]
    assert not [p for q, p in expanded if q == 0]
    assert len([p for q, p in expanded if q == 1]) == 2
    assert {len(p) for q, p in expanded if q == 2} == {1}
    for tree in trees:
        assert len(tree) == 9
    # Whatever could not be found is a root child without a token.
    assert trees[0].tokens.tolist()[3:] == [NO_TOKEN] * 6
    assert depths_of(trees[0]).tolist() == [1] * 9
    assert trees[0].parents.tolist() == [ROOT] * 9
    assert depths_of(trees[2]).max() == 2


@pytest.mark.parametrize("seed", range(5))
def test_nodes_below_the_least_probability_are_neither_kept_nor_expanded(seed):
    (whole,), _ = grow(BestFirstTree(4, 12, 0), 30, (seed,))
    (tree,), levels = grow(BestFirstTree(4, 12, 0.05), 30, (seed,))
    wanted = [
        p
        for p in (path_to(whole, i) for i in range(30))
        if np.exp(logprob_of(p, seed)) >= 0.05
    ]
    assert 0 < len(wanted) < 30
    assert [path_to(tree, i) for i in range(len(wanted))] == wanted
    assert set(tree.tokens[len(wanted) :].tolist()) == {NO_TOKEN}
    expanded = [path for level in levels for _, path in level]
    assert all(np.exp(logprob_of(p, seed)) >= 0.05 for p in expanded)


def test_only_nodes_worth_it_are_expanded():
    seeds = (3, 1, 4)
    trees, levels = grow(BestFirstTree(4, 4, 0), 12, seeds, worth=Worth(1, 0.15))
    expanded = [(q, path) for level in levels for q, path in level]
    chances = [np.exp(logprob_of(path, seeds[q])) for q, path in expanded]
    assert expanded and min(chances) >= 0.15
    # What is not expanded stays in its tree.
    for q, tree in enumerate(trees):
        check(tree)
        real = np.flatnonzero(tree.tokens != NO_TOKEN)
        paths = {tuple(path_to(tree, i)) for i in real}
        assert paths > {path for r, path in expanded if r == q}


def test_a_cpu_grows_by_the_compiled_twin():
    assert compiled_steps().grow is CompiledGrowth


@given(st.integers(0, 1 << 32))
def test_definition_and_twin_agree_whatever_is_proposed(seed):
    rng = np.random.default_rng(seed)
    r, num_nodes = rng.integers(1, 5), int(rng.integers(1, 12))
    tree = BestFirstTree(int(rng.integers(1, 6)), int(rng.integers(1, 5)), 0)
    if rng.random() < 0.3:
        tree = ExpansionTree(tuple(rng.integers(1, 4, rng.integers(1, 5)).tolist()))
    growth = Growth(
        tree,
        num_nodes,
        rng.integers(0, 200 if rng.random() < 0.5 else 12, r),
        rng.integers(0, 7, r),
        np.log(rng.choice([1e-9, 0.01, 0.1], r)),
        Worth(*rng.random(4) / (1, 9, 2, 4)) if rng.random() < 0.5 else EVERYTHING,
    )
    rows = r
    while True:
        shape = rows, growth.num_children
        # Ties, and children that are none.
        logprobs = -rng.integers(0, 12, shape).astype(np.float32) / 4
        logprobs[rng.random(shape) < 0.1] = -np.inf
        logprobs[rng.random(rows) < 0.1] = np.nan  # an overflow of the SSM's
        frontier = growth.extend(logprobs, rng.integers(0, VOCAB, shape))
        if frontier is None:
            break
        rows = len(frontier.tokens)
    growth.finish()
