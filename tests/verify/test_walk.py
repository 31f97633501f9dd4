"""The walk emits what plain decoding would, for any tree."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.token_trees import paths_in, tree_of
from vllm_specinfer.tree.token_tree import ROOT
from vllm_specinfer.verify.walk import TreeWalk

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=12)


def plain_next(prefix):
    """A deterministic toy target over three tokens."""
    return (sum((i + 1) * t for i, t in enumerate(prefix)) * 7 + len(prefix)) % 3


@given(PATHS, st.lists(st.integers(0, 2), max_size=4))
def test_walk_goes_with_the_plain_continuation_as_deep_as_the_tree(paths, prompt):
    tree = tree_of(paths)
    known = {path: row for row, path in enumerate(paths_in(tree), start=1)}
    walk = TreeWalk(tree.tokens, tree.parents)
    emitted = []
    while True:
        emitted.append(plain_next(prompt + emitted))
        if not walk.advance(emitted[-1]):
            break
    assert walk.path == [known[tuple(emitted[: d + 1])] for d in range(len(walk.path))]
    assert len(emitted) == len(walk.path) + 1
    assert tuple(emitted) not in known


def test_walk_without_nodes_stays_at_the_root():
    empty = tree_of([])
    walk = TreeWalk(empty.tokens, empty.parents)
    assert not walk.advance(42)
    assert walk.path == []


def test_of_equal_siblings_the_first_is_followed():
    walk = TreeWalk(np.array([7, 7, 5, 6]), np.array([ROOT, ROOT, 0, 1]))
    assert walk.advance(7) and walk.advance(5)
    assert walk.path == [1, 3]
