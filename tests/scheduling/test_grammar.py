"""What vLLM's grammars make of several tokens at once."""

from types import SimpleNamespace

import llguidance
import pytest
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

from vllm_specinfer.scheduling.grammar import goes_on_behind_its_end


@pytest.fixture
def make():
    """Makes guidance's grammar of two letters, whose tokens are bytes."""
    tokenizer = llguidance.LLTokenizer("byte")

    def made():
        letters = llguidance.LLMatcher.grammar_from_regex("[a-c]{2}")
        matcher = llguidance.LLMatcher(tokenizer, letters)
        return GuidanceGrammar(matcher, tokenizer, tokenizer.vocab_size)

    return made, tokenizer.eos_token


@pytest.mark.parametrize("sizes", [[4], [1, 3], [2, 2], [3, 1], [1] * 4])
def test_guidance_goes_on_behind_the_end_however_tokens_come(make, sizes):
    made, end = make
    tokens, grammar = [*b"ab", end, ord("x")], made()
    structured = SimpleNamespace(grammar=grammar)
    goes_on_behind_its_end(SimpleNamespace(structured_output_request=structured))
    for size in sizes:
        step, tokens = tokens[:size], tokens[size:]
        assert grammar.accept_tokens("", step)
    assert grammar.is_terminated()


def test_guidance_refuses_what_it_does_not_allow(make):
    made, _ = make
    structured = SimpleNamespace(grammar=made())
    goes_on_behind_its_end(SimpleNamespace(structured_output_request=structured))
    assert not structured.grammar.accept_tokens("", [*b"ax"])
