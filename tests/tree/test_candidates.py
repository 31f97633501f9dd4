"""The union of several sources' trees is the set of their paths; the best N stay."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.token_trees import check, depths_of, paths_in
from vllm_specinfer.kernels.cpu import trees as compiled
from vllm_specinfer.tree import candidates
from vllm_specinfer.tree.candidates import NO_TOKEN, Candidates
from vllm_specinfer.tree.token_tree import ROOT, TokenTree

# A tree as nodes (parent among the earlier ones, token, chance given the parent).
nodes = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 3), st.floats(0.05, 0.95)), max_size=12
)
sources = st.lists(st.lists(nodes, min_size=2, max_size=2), min_size=1, max_size=3)


def merge(sources):
    """By the definition and its compiled twin, which must agree."""
    (union, columns), (same, theirs) = (
        module.merge(sources) for module in (candidates, compiled)
    )
    assert (union.tokens == same.tokens).all()
    assert (union.parents == same.parents).all()
    assert union.scores == pytest.approx(same.scores, rel=1e-6)
    for column, other in zip(columns, theirs, strict=True):
        assert (column == other).all()
    return union, columns


def best(of, *args):
    """Likewise."""
    found, same = of.best(*args), compiled.best(of, *args)
    for values, others in zip(vars(found).values(), vars(same).values(), strict=True):
        assert np.array_equal(values, others) and values.dtype == others.dtype
    return found


def a_source(trees):
    """Candidates of the requests, and per request the chance of each path."""
    width = max(len(tree) for tree in trees)
    found, chances = Candidates.empty(len(trees), width + 1), []
    for r, tree in enumerate(trees):
        paths: dict[tuple[int, ...], float] = {}
        places: dict[tuple[int, ...], int] = {}
        column = 0
        for at, token, chance in tree:
            above = list(places)[at % len(places)] if places and at % 2 else ()
            path = (*above, token)
            if path in paths:
                continue
            column += 1  # the first column stays empty: no node
            paths[path] = paths.get(above, 1.0) * chance
            places[path] = column
            found.tokens[r, column] = token
            found.parents[r, column] = places.get(above, ROOT)
            found.scores[r, column] = np.log(paths[path])
        chances.append(paths)
    return found, chances


def paths_of(tree: Candidates, r: int) -> dict[int, tuple[int, ...]]:
    """Path by candidate."""
    paths = {ROOT: ()}
    for c in np.flatnonzero(np.isfinite(tree.scores[r])).tolist():
        paths[c] = (*paths[int(tree.parents[r, c])], int(tree.tokens[r, c]))
    return paths


@given(sources)
def test_a_merge_has_every_path_once_and_nothing_else(trees):
    found = [a_source(of_source) for of_source in trees]
    union, columns = merge([f[0] for f in found])
    for r in range(2):
        merged = paths_of(union, r)
        misses: dict[tuple[int, ...], float] = {}
        for _, chances in found:
            for path, chance in chances[r].items():
                misses[path] = misses.get(path, 1.0) * (1 - chance)
        own = [path for c, path in merged.items() if c != ROOT]
        assert sorted(own) == sorted(misses)
        for c, path in merged.items():
            if c != ROOT:
                assert np.exp(union.scores[r, c]) == pytest.approx(
                    1 - misses[path], abs=1e-5
                )
        for (source, _), column in zip(found, columns, strict=True):
            for c, path in paths_of(source, r).items():
                if c != ROOT:
                    assert merged[int(column[r, c])] == path


@given(sources, st.integers(1, 9))
def test_the_best_nodes_form_trees_in_flat_order(trees, num_nodes):
    union, _ = merge([a_source(of_source)[0] for of_source in trees])
    finished = best(union, num_nodes, np.log(0.1))
    for r, tree in enumerate(finished.each()):
        check(tree)
        paths = paths_of(union, r)
        scores = {p: union.scores[r, c] for c, p in paths.items() if c != ROOT}
        kept = paths_in(tree)
        wanted = sorted((s for s in scores.values() if s >= np.log(0.1)), reverse=True)
        assert [scores[p] for p in kept] == wanted[:num_nodes]
        for c, path in paths.items():
            place = ROOT if c == ROOT else finished.places[r, c]
            if c != ROOT:
                assert (path in kept) == (place < num_nodes)
                assert path not in kept or kept[place] == path
        padding = finished.tokens[r, len(tree) :]
        assert (padding == NO_TOKEN).all()
        whole = TokenTree(finished.tokens[r], finished.parents[r])
        assert (depths_of(whole)[len(tree) :] == 1).all()


@given(sources, st.integers(1, 9))
def test_cut_candidates_are_the_tree_that_would_be_kept(trees, num_nodes):
    whole, _ = a_source(trees[0])
    cut = whole.cut(num_nodes)
    wanted = best(whole, num_nodes)
    for kept in (best(cut, 12), best(whole, 12, -np.inf, num_nodes)):
        assert kept.tokens.shape == (2, 12)
        for tree, expected in zip(kept.each(), wanted.each(), strict=True):
            assert tree.tokens.tolist() == expected.tokens.tolist()
            assert tree.parents.tolist() == expected.parents.tolist()
    for r in range(2):  # the columns still are what draws were recorded for
        assert paths_of(cut, r).items() <= paths_of(whole, r).items()


def test_nodes_are_shared_by_path_not_by_token_and_depth():
    one, other = (a_source([tree])[0] for tree in ([(0, 1, 0.9)], [(0, 2, 0.9)]))
    below = Candidates(np.array([[1, 3]]), np.array([[ROOT, 0]]), np.log([[0.9, 0.5]]))
    beside = Candidates(np.array([[2, 3]]), np.array([[ROOT, 0]]), np.log([[0.8, 0.7]]))
    union, _ = merge([one, other, below, beside])
    paths = sorted(paths_of(union, 0).values())
    assert paths == [(), (1,), (1, 3), (2,), (2, 3)]


@pytest.mark.parametrize("num_sources", [1, 2])
def test_a_step_without_a_request_that_grows_has_no_trees(num_sources):
    union, columns = merge([Candidates.empty(0, 3)] * num_sources)
    trees = best(union, 8)
    assert trees.tokens.shape == trees.parents.shape == (0, 8)
    assert len(columns) == num_sources and union.nth_score(8).shape == (0,)
