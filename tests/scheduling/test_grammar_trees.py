"""What grammars allow at the nodes of trees, for each of vLLM's own grammars."""

import functools
import json
import random
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from tests.e2e.models import VOCAB, add_tokenizer
from tests.scheduling.block_worker import Engine, make_scheduler
from tests.token_trees import path_to
from vllm_specinfer.scheduling.draft_trees import DraftTrees
from vllm_specinfer.scheduling.grammar import bitmask_of_trees, goes_on_behind_its_end
from vllm_specinfer.tree.token_tree import NO_NODE, ROOT, TokenTree

BACKENDS = {
    "xgrammar": XgrammarBackend,
    "guidance": GuidanceBackend,
    "outlines": OutlinesBackend,
}
EOS, MOST_NODES, EVERYTHING = 95, 32, -1
REGEX, SCHEMA = "[a-c]{1,3}(x|yz)?", {"type": "array", "items": {"type": "boolean"}}
GRAMMARS = {
    REGEX: StructuredOutputOptions.REGEX,
    json.dumps(SCHEMA): StructuredOutputOptions.JSON,
}
# The end of what the requests of some tests think.
END_OF_REASONING = ord("!") - 32


def tokens_of(text):
    return [ord(letter) - 32 for letter in text]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Token i is the character chr(32 + i)."""
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    add_tokenizer(folder, eos=EOS)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def manager(tokenizer):
    """Makes vLLM's manager of grammars, with one of its backends."""

    def made(backend):
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            model_config=SimpleNamespace(
                skip_tokenizer_init=True,
                is_diffusion=False,
                hf_config=SimpleNamespace(model_type="llama"),
            ),
            parallel_config=SimpleNamespace(distributed_executor_backend=None),
            structured_outputs_config=SimpleNamespace(
                enable_in_reasoning=False,
                disable_any_whitespace=True,
                disable_additional_properties=False,
            ),
            speculative_config=SimpleNamespace(num_speculative_tokens=MOST_NODES),
            num_speculative_tokens=MOST_NODES,
        )
        manager = StructuredOutputManager(config)
        manager.tokenizer = tokenizer
        manager.backend = BACKENDS[backend](
            config, tokenizer=tokenizer, vocab_size=VOCAB
        )
        return manager

    return made


def request_of(manager, name, text, spec):
    """A request that has got so far."""
    grammar = manager.backend.compile_grammar(GRAMMARS[spec], spec, {EOS})
    request = SimpleNamespace(
        request_id=name,
        use_structured_output=True,
        prompt_token_ids=[],
        all_token_ids=[],
        structured_output_request=SimpleNamespace(
            grammar=grammar,
            reasoning_ended=None,
            reasoner=None,
            reasoning_parser_kwargs=None,
            masked_reasoning_end_ids=None,
        ),
    )
    goes_on_behind_its_end(request)
    assert grammar.accept_tokens(name, tokens_of(text))
    return request


def random_tree(rng, num_nodes, letters):
    tokens, parents = [], []
    for node in range(num_nodes):
        tokens.append(rng.choice(letters))
        parents.append(rng.choice([ROOT, *range(max(0, node - 4), node)]))
    return TokenTree.of(tokens, parents)


def rows_of_each(manager, requests, trees):
    """By request its rows of the bitmask of all."""
    bitmask = bitmask_of_trees(manager, requests, trees)
    rows_of_one = len(manager.grammar_bitmask({"r": requests[0]}, ["r"], {}))
    start = 0
    found = []
    for tree in trees:
        found.append(bitmask[start : start + len(tree) + 1].tolist())
        start += max(rows_of_one, len(tree) + 1)
    assert start == len(bitmask)
    return found


def rows_by_node(manager, request, tree):
    """What vLLM says of the path to each node, as if it were all drafts."""
    found = []
    for node in range(ROOT, len(tree)):
        path = path_to(tree, node)
        rows = np.full((1, -(-VOCAB // 32)), EVERYTHING)
        if manager.validate_tokens(request, path) == path:
            rows = manager.grammar_bitmask({"r": request}, ["r"], {"r": path})
            rows = rows[[len(path)]]
        found += rows.tolist()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_those_of_the_path_to_each_node(manager, backend):
    manager, rng = manager(backend), random.Random(0)
    letters = [[*tokens_of(kind), EOS] for kind in ("abxyz", "xyz", "[]true,", "true")]
    requests = [
        request_of(manager, "0", "a", REGEX),
        request_of(manager, "1", "abcx", REGEX),
        request_of(manager, "2", "[true,", json.dumps(SCHEMA)),
        request_of(manager, "3", "[]", json.dumps(SCHEMA)),
    ]
    constrained = 0
    for _ in range(100):
        trees = [random_tree(rng, rng.randrange(MOST_NODES), kind) for kind in letters]
        found = rows_of_each(manager, requests, trees)
        expected = [
            rows_by_node(manager, request, tree)
            for request, tree in zip(requests, trees, strict=True)
        ]
        assert found == expected
        constrained += sum(row[0] != EVERYTHING for rows in found for row in rows[1:])
    assert constrained > 200


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_behind_the_end_is_free(manager, backend):
    manager = manager(backend)
    request = request_of(manager, "0", "ab", REGEX)
    tree = TokenTree.of([EOS, *tokens_of("xcx"), EOS], [ROOT, 0, ROOT, 2, 3])
    (rows,) = rows_of_each(manager, [request], [tree])
    free = [row == [EVERYTHING] * len(row) for row in rows]
    assert free == [False, True, True, False, False, True]
    assert manager.accept_tokens(request, [*tokens_of("cx"), EOS, 3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_grammar_goes_to_each_node_once(manager, backend):
    manager = manager(backend)
    request = request_of(manager, "0", "", REGEX)
    # a, ab, aba, abb, abc, abax, then what the grammar forbids.
    tree = TokenTree.of(tokens_of("ababcxxb"), [ROOT, 0, 1, 1, 1, 2, ROOT, 6])
    grammar = request.structured_output_request.grammar
    gone = []

    def accept(function, request_id, tokens):
        gone.extend(tokens)
        return function(request_id, tokens)

    accepted = functools.partial(accept, grammar.accept_tokens)
    with mock.patch.object(grammar, "accept_tokens", accepted):
        bitmask_of_trees(manager, [request], [tree])
    assert sorted(gone) == sorted(tree.tokens[:6].tolist())


def test_what_is_no_node_allows_everything(manager):
    manager = manager("xgrammar")
    request = request_of(manager, "0", "", REGEX)
    (rows,) = rows_of_each(manager, [request], [TokenTree.of([-1] * 2, [NO_NODE] * 2)])
    assert [row[0] == EVERYTHING for row in rows] == [False, True, True]


class Reasoner:
    """Thinks until an exclamation mark."""

    def __init__(self, **_):
        pass

    def is_reasoning_end(self, tokens):
        return END_OF_REASONING in tokens

    def is_reasoning_end_streaming(self, tokens, new):
        return END_OF_REASONING in new


def test_rows_behind_the_end_of_reasoning_are_the_grammars(manager):
    manager = manager("xgrammar")
    manager.reasoner_cls = Reasoner
    thinks, wants = (request_of(manager, name, "", REGEX) for name in "01")
    wants.prompt_token_ids = tokens_of("!")
    tree = TokenTree.of(tokens_of("x!!axxy!"), [ROOT, 0, ROOT, 1, 3, ROOT, 2, 5])
    found = rows_of_each(manager, [thinks, wants], [tree, tree])
    free = [row[0] == EVERYTHING for row in found[0]]
    assert free == [True, True, False, False, False, False, True, True, False]
    assert found[0] == rows_by_node(manager, thinks, tree)
    assert found[1] == rows_by_node(manager, wants, tree)


def test_paths_that_reason_to_their_end_are_as_free_as_their_root(manager):
    manager = manager("xgrammar")
    manager.reasoner_cls = Reasoner
    request = request_of(manager, "0", "", REGEX)
    request.structured_output_request.reasoning_ended = False
    # x, xy, !, !a
    tree = TokenTree.of(tokens_of("xy!a"), [ROOT, 0, ROOT, 2])
    asked = []

    def grammar_bitmask(requests, ids, drafts):
        asked.append(drafts.get("0", []))
        # As vLLM 0.33 does, keep a token from reasoning.
        return np.array([[7], [8], [9]])[: len(asked[-1]) + 1]

    with mock.patch.object(manager, "grammar_bitmask", grammar_bitmask):
        rows = bitmask_of_trees(manager, [request], [tree])
    assert asked == [[], tokens_of("!a")]
    assert rows.tolist() == [[7], [7], [7], [8], [9]]


@pytest.mark.parametrize("tokens", [[5, 6, 7], [-1] * 3])
def test_a_tree_waits_for_its_grammar_as_a_whole(tokens):
    engine = Engine(make_scheduler(), 0)
    engine.add(length=3, text=0, max_tokens=30)
    engine.step(0)
    scheduler = engine.scheduler
    ((name, request),) = scheduler.requests.items()
    drafts = DraftTrees([name], [tokens], [[ROOT, 0, ROOT]])
    with (
        mock.patch.object(Request, "use_structured_output", True),
        mock.patch.object(StructuredOutputManager, "validate_tokens") as asked,
    ):
        scheduler.update_draft_token_ids(drafts)
        known = tokens if tokens[0] >= 0 else []
        assert request.spec_token_ids == known
        request.is_prefill_chunk = True
        scheduler.update_draft_token_ids(drafts)
        assert request.spec_token_ids == []
    asked.assert_not_called()
