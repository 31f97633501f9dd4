"""The greedy walk emits what plain decoding would, for any tree."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_specinfer.tree.token_tree import TokenTree
from vllm_specinfer.verify.greedy import walk

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=12)


def plain_next(prefix):
    """A deterministic toy target over three tokens."""
    return (sum((i + 1) * t for i, t in enumerate(prefix)) * 7 + len(prefix)) % 3


@given(PATHS, st.lists(st.integers(0, 2), max_size=4))
def test_walk_emits_the_plain_continuation_and_goes_as_deep_as_the_tree(paths, prompt):
    tree = TokenTree.from_paths(paths)
    rows = [prompt, *(prompt + tree.path(i) for i in range(len(tree)))]
    choices = np.array([plain_next(row) for row in rows])
    path, emitted = walk(tree.tokens, tree.parents, choices)

    plain = list(prompt)
    for _ in emitted:
        plain.append(plain_next(plain))
    assert emitted == plain[len(prompt) :]
    assert len(emitted) == len(path) + 1
    known = {tuple(tree.path(i)): i + 1 for i in range(len(tree))}
    assert path == [known[tuple(emitted[: d + 1])] for d in range(len(path))]
    assert tuple(emitted) not in known


def test_walk_without_nodes_emits_only_the_correction():
    empty = TokenTree.from_paths([])
    assert walk(empty.tokens, empty.parents, np.array([42])) == ([], [42])
