"""What lookups find in texts."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.spec_decode.ngram_proposer import (
    _find_longest_matched_ngram_and_propose_tokens as vllm_ngram,
)

from vllm_specinfer.drafting.lookup import LookupSource, chance_after
from vllm_specinfer.drafting.ngram import Ngrams
from vllm_specinfer.drafting.suffix import (
    MIN_OWN,
    MIN_PAST,
    PAST_TRUST,
    Suffixes,
    TextIndex,
)
from vllm_specinfer.options import NgramSource, SuffixSource
from vllm_specinfer.tree.token_tree import ROOT

VOCAB = 10
texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def tokens_of(text):
    return np.array(text, np.int32)


@given(texts, st.integers(1, 4), st.integers(0, 3), st.integers(1, 7))
def test_ngrams_are_those_of_vllms_own_method(text, least, more, depth):
    text, most = tokens_of(text), least + more
    nodes = Ngrams(NgramSource(least, most), depth).find(0, text)
    wanted = vllm_ngram.py_func(text, least, most, 10_000, depth)
    assert [token for _, token, _ in nodes] == wanted.tolist()
    assert [parent for parent, _, _ in nodes] == [ROOT, *range(len(nodes) - 1)][
        : len(nodes)
    ]
    chances = [chance for _, _, chance in nodes]
    assert all(0 < chance < 1 for chance in chances)
    assert chances == sorted(chances)  # the longer a match, the surer


def test_placeholders_beyond_the_vocabulary_are_no_nodes_nor_is_what_is_below():
    nodes = [(ROOT, 3, 0.9), (ROOT, VOCAB, 0.8), (1, 4, 0.7), (0, 5, 0.6), (3, 99, 0.5)]
    nodes += [(3, 6, 0.4)]
    lookup = SimpleNamespace(find=lambda slot, tokens, alone: nodes)
    step = SimpleNamespace(
        growing=np.array([0]),
        slots=np.array([0]),
        num_tokens=np.array([1]),
        all_token_ids=np.zeros((1, 1), np.int32),
        tests_draws=False,
    )
    found = LookupSource(lookup, VOCAB).propose(step).candidates
    assert found.tokens.tolist() == [[3, 5, 6]]
    assert found.parents.tolist() == [[ROOT, 0, 1]]
    assert len(LookupSource(lookup).propose(step).candidates.tokens[0]) == len(nodes)


def longest_match(context, text, most=32):
    """Length and places of the longest match by brute force; places have a token."""
    found = {}
    for place in range(1, len(text)):
        n = 0
        while (
            n < min(place, len(context), most)
            and text[place - n - 1] == context[-n - 1]
        ):
            n += 1
        found.setdefault(n, []).append(place)
    length = max(found, default=0)
    return length, found.get(length, [])


def paths_of(nodes):
    """Path and chance of the whole path of every node."""
    paths, chances = {ROOT: ()}, {ROOT: 1.0}
    for i, (parent, token, chance) in enumerate(nodes):
        paths[i] = (*paths[parent], token)
        chances[i] = chances[parent] * chance
    return {paths[i]: chances[i] for i in range(len(nodes))}


@given(texts, st.integers(1, 9))
def test_suffixes_continue_the_longest_match_of_the_own_text(text, num_nodes):
    lookup = Suffixes(SuffixSource(), max_num_reqs=1, num_nodes=num_nodes)
    lookup.start(0)
    for end in range(1, len(text)):  # as tokens come
        lookup.find(0, tokens_of(text[:end]))
    found = paths_of(lookup.find(0, tokens_of(text)))
    length, places = longest_match(text, text)
    if length < MIN_OWN:
        assert not found
        return
    wanted: dict[tuple, float] = {}
    endless = []
    for place in places[-16:]:
        path = text[place:]
        endless.append((path * num_nodes)[:num_nodes])
    for path in endless:
        chance = 1 / len(endless)
        for d in range(num_nodes):
            chance *= chance_after(length + d)
            start = tuple(path[: d + 1])
            wanted[start] = wanted.get(start, 0) + chance
    # The likeliest nodes of all.
    assert len(found) == min(num_nodes, len(wanted))
    assert found == pytest.approx({path: wanted[path] for path in found})
    best = sorted(wanted.values(), reverse=True)[:num_nodes]
    assert sorted(found.values(), reverse=True) == pytest.approx(best)


def test_a_loop_is_continued_beyond_its_last_round():
    lookup = Suffixes(SuffixSource(), max_num_reqs=1, num_nodes=7)
    lookup.start(0)
    (path,) = [
        p for p in paths_of(lookup.find(0, tokens_of([1, 2, 3] * 4))) if len(p) == 7
    ]
    assert path == (1, 2, 3, 1, 2, 3, 1)


def test_past_texts_are_found_until_they_are_dropped():
    lookup = Suffixes(SuffixSource(max_tokens=80), max_num_reqs=9, num_nodes=3)
    lookup.start(0)
    lookup.find(0, tokens_of([5, 6, 7, 8, 9]))
    lookup.start(0)  # the next request takes the slot
    context = tokens_of([1, 5, 6, 7])
    found = paths_of(lookup.find(1, context))
    assert list(found) == [(8,), (8, 9)]
    assert found[(8,)] == pytest.approx(PAST_TRUST * chance_after(MIN_PAST))
    assert not lookup.find(2, tokens_of([6, 7]))  # too short a match
    for i in range(3):
        assert lookup.find(3 + i, context)
        lookup.find(0, tokens_of(range(100 + 30 * i, 130 + 30 * i)))
        lookup.start(0)
    assert not lookup.find(8, context)
    lookup.find(0, tokens_of([5, 6, 7, 8]))
    lookup.start(0)
    assert lookup.find(0, context)
    lookup.forget()
    assert not lookup.find(0, context)


def test_private_texts_are_found_by_nobody_else():
    source = LookupSource(Suffixes(SuffixSource(), max_num_reqs=1, num_nodes=4))
    for is_private, found in ((True, None), (False, None), (False, 6), (True, 6)):
        source.start(0, SimpleNamespace(is_private=is_private))
        nodes = source._lookup.find(0, tokens_of([1, 2, 3]))
        assert [token for _, token, _ in nodes] == ([] if found is None else [found])
        source.end(0, tokens_of([1, 2, 3, 5 if is_private else 6]))


def test_who_looks_up_its_own_text_is_found_by_others():
    source = LookupSource(Suffixes(SuffixSource(), max_num_reqs=2, num_nodes=1))
    for slot, alone, text, found in (
        (0, True, [1, 2, 3, 5], []),
        (0, True, [1, 2, 3], []),
        (1, False, [1, 2, 3], [5]),
        (0, True, [1, 2, 3, 6, 1, 2, 3], [6]),
        (0, False, [7, 1, 2, 3], [6]),
    ):
        source.start(slot, SimpleNamespace(looks_up_itself=alone))
        step = SimpleNamespace(
            growing=np.array([0]),
            slots=np.array([slot]),
            num_tokens=np.array([len(text)]),
            all_token_ids=np.tile(tokens_of(text), (2, 1)),
            tests_draws=False,
        )
        assert source.propose(step).candidates.tokens[0].tolist() == found
        source.end(slot, tokens_of(text))


def test_texts_do_not_run_into_each_other():
    lookup = Suffixes(SuffixSource(), max_num_reqs=1, num_nodes=4)
    for text in ([5, 6, 7, 8], [9, 1, 2, 3]):
        lookup.start(0)
        lookup.find(0, tokens_of(text))
    lookup.start(0)
    assert list(paths_of(lookup.find(0, tokens_of([5, 6, 7])))) == [(8,)]


def test_the_likeliest_nodes_may_be_deep_ones():
    lookup = Suffixes(SuffixSource(), max_num_reqs=1, num_nodes=3)
    lookup.start(0)
    often = [token for n in (10, 11, 12) for token in (n, 1, 2, 5, 6, 7)]
    found = lookup.find(0, tokens_of([*often, 13, 1, 2, 9, 8, 14, 1, 2]))
    assert list(paths_of(found)) == [(5,), (5, 6), (5, 6, 7)]


def test_a_text_that_has_ended_is_kept_whole_and_its_index_is_gone():
    """Whether or not another request takes its slot, and once."""
    lookup = Suffixes(SuffixSource(max_tokens=100), 2, 3)
    source, text = LookupSource(lookup), np.arange(1, 9, dtype=np.int32)
    lookup.start(0)
    lookup.start(1)
    lookup.find(0, text[:5])
    source.end(0, text)
    assert not lookup._own[0]._newest
    for _ in range(2):
        nodes = lookup.find(1, np.array([20, 4, 5, 6], np.int32))
        assert [token for _, token, _ in nodes] == [7, 8]
        lookup.start(0)
    assert len(lookup._past[0].tokens) == len(text) + 1


def test_a_token_of_past_texts_takes_as_much_memory_as_readme_says():
    text = np.random.default_rng(0).permutation(44_000).tolist()
    tracemalloc.start()
    try:
        index = TextIndex(MIN_PAST)
        index.extend(text)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 100 < size / len(text) < 140


def test_fewer_tokens_than_a_run_match_nothing():
    index = TextIndex(2)
    index.extend([0, 4, 9, 4])
    assert index.longest_match([4]) == (0, [])
    assert index.longest_match([0, 4]) == (2, [2])
