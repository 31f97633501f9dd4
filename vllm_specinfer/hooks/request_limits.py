"""Requests that Model Runner V2 has no room for are refused one by one.

Symptom: a request with more allowed, biased or stop tokens, or more tokens in bad words
    than V2's tables hold, or with a number that no integer of theirs holds, ends the
    engine with everybody else's requests.
Reason: the worker is the first to count. On a CPU, plain vLLM runs V1, which has no
    such limits.
Removed when: vLLM's front end counts.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_specinfer.hooks import wrap

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

INT64_MAX = 2**63 - 1


def install() -> None:
    """Wrap ``InputProcessor.process_inputs`` once."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    def process(
        original: Callable[..., "EngineCoreRequest"],
        self: InputProcessor,
        *args: Any,
        **kwargs: Any,
    ) -> "EngineCoreRequest":
        request = original(self, *args, **kwargs)
        config = self.speculative_config
        params = request.sampling_params
        if params is None or not getattr(config, "verifies_with_plain_sampler", False):
            return request
        for name, count, most in _counts(params):
            if count > most:
                raise VLLMValidationError(
                    f"{name} must be at most {most} for method specinfer; got {count}"
                )
        if params.max_tokens is not None:  # a text ends there anyway
            longest = self.model_config.max_model_len
            params.max_tokens = min(params.max_tokens, longest)
            params.min_tokens = min(params.min_tokens, params.max_tokens)
        return request

    wrap(InputProcessor, "process_inputs", process)


def _counts(params: "SamplingParams") -> Iterator[tuple[str, int, int]]:
    """What is counted, how much of it a request has, and how much it may have."""
    from vllm import envs
    from vllm.v1.worker.gpu.sample.logit_bias import (
        MAX_NUM_ALLOWED_TOKEN_IDS,
        MAX_NUM_LOGIT_BIAS_TOKENS,
        MAX_NUM_STOP_TOKEN_IDS,
    )

    allowed, biased = params.allowed_token_ids or (), params.logit_bias or ()
    stops = params.all_stop_token_ids if params.min_tokens > 0 else ()
    in_words = sum(map(len, params.bad_words_token_ids or ()))
    yield "allowed_token_ids", len(allowed), MAX_NUM_ALLOWED_TOKEN_IDS
    yield "tokens in logit_bias", len(biased), MAX_NUM_LOGIT_BIAS_TOKENS
    yield "stop tokens of a request with min_tokens", len(stops), MAX_NUM_STOP_TOKEN_IDS
    yield "tokens in bad_words", in_words, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    if params.seed is not None:
        yield "seed + n - 1", params.seed + params.n - 1, INT64_MAX
