"""A token tree's arrays describe the same tree however they are read."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.token_trees import (
    bits_of,
    check,
    depths_of,
    first_nodes,
    path_to,
    paths_in,
    tree_of,
)
from vllm_specinfer.tree.token_tree import (
    NO_NODE,
    ROOT,
    TokenTree,
    ancestor_bits,
    chain_bits,
    node_depths,
    num_words,
)


@st.composite
def trees(draw, max_nodes=200):
    n = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(ROOT, i - 1)) for i in range(n)]
    return TokenTree(np.arange(n) * 7 + 3, np.array(parents, np.int32))


def ancestors(tree, node):
    rows = {0}
    while node != ROOT:
        rows.add(node + 1)
        node = int(tree.parents[node])
    return rows


def set_bits(row):
    return {
        64 * w + b
        for w, word in enumerate(row.view(np.uint64))
        for b in range(64)
        if int(word) >> b & 1
    }


@given(trees())
def test_ancestor_bits_are_the_path_to_the_root_for_any_size(tree):
    bits = bits_of(tree)
    assert bits.shape == (len(tree) + 1, num_words(len(tree) + 1))
    assert set_bits(bits[0]) == {0}
    for node in range(len(tree)):
        assert set_bits(bits[node + 1]) == ancestors(tree, node)


@given(trees())
def test_depth_counts_the_tokens_of_the_path(tree):
    assert depths_of(tree).tolist() == [len(path) for path in paths_in(tree)]


@given(trees(), st.integers(0, 200))
def test_every_prefix_of_the_node_list_is_a_tree_with_the_same_paths(tree, cut):
    head = first_nodes(tree, cut)
    check(head)
    assert len(head) == min(cut, len(tree))
    for node in range(len(head)):
        assert path_to(head, node) == path_to(tree, node)
    rows = len(head) + 1
    words = bits_of(head).shape[1]
    assert (bits_of(head) == bits_of(tree)[:rows, :words]).all()


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=12))
def test_trie_union_holds_every_prefix_of_every_path_once(paths):
    tree = tree_of(paths)
    check(tree)
    expected = {tuple(p[: i + 1]) for p in paths for i in range(len(p))}
    got = paths_in(tree)
    assert len(got) == len(set(got))
    assert set(got) == expected


@given(st.lists(trees(max_nodes=70), min_size=1, max_size=5))
def test_batched_rows_equal_those_of_each_tree(batch):
    n = min(len(t) for t in batch)
    parents = np.stack([first_nodes(t, n).parents for t in batch])
    for i, tree in enumerate(batch):
        head = first_nodes(tree, n)
        assert (ancestor_bits(parents)[i] == bits_of(head)).all()
        assert (node_depths(parents)[i, 1:] == depths_of(head)).all()


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 200])
def test_chain_bits_are_the_causal_triangle(rows):
    bits = chain_bits(rows, 5)
    assert [set_bits(r) for r in bits] == [set(range(i + 1)) for i in range(rows)]


@pytest.mark.parametrize(
    "tokens, parents",
    [
        ([1, 2], [0, ROOT]),  # a node is its own parent
        ([1, 2, 3], [ROOT, 2, 0]),  # a parent after its child
        ([5, 5], [ROOT, ROOT]),  # two siblings with one token
        ([1], [ROOT, ROOT]),
        ([1], [-2]),
    ],
)
def test_integrity_check_refuses_what_is_not_a_tree(tokens, parents):
    with pytest.raises(ValueError, match="must"):
        check(TokenTree(np.array(tokens), np.array(parents, np.int32)))


@given(trees())
def test_leaf_paths_are_the_longest_paths_and_cover_the_tree(tree):
    paths = list(tree.leaf_paths())
    for path in paths:
        assert [int(tree.tokens[node]) for node in path] == path_to(tree, path[-1])
        assert path[-1] not in tree.parents
    assert {node for path in paths for node in path} == set(range(len(tree)))
    assert len({path[-1] for path in paths}) == len(paths)


@given(trees())
def test_no_path_goes_to_what_is_no_node(tree):
    padded = TokenTree(
        np.append(tree.tokens, [0, 0]), np.append(tree.parents, [NO_NODE, NO_NODE])
    )
    assert list(padded.leaf_paths()) == list(tree.leaf_paths())
