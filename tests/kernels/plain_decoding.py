"""Decode one fixed set of requests on a tiny random model with V1 or V2."""

import json
import os
import sys
from pathlib import Path
from typing import Any

VOCAB = 320


def make_model(path: Path) -> None:
    """A two-layer Llama with a byte tokenizer, random but far from uniform."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({byte: i for i, byte in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(path)


def _prompt(seed: int, length: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(seed * 37 + i * i * 11) % 256 for i in range(length)]}


def _decode(llm: Any, runner: str) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def params(**kwargs: Any) -> SamplingParams:
        defaults = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
        return SamplingParams(**(defaults | kwargs))

    greedy = params()
    cases = {
        "greedy": greedy,
        "top_k_1": params(temperature=0.7, top_k=1),
        "tiny_top_p": params(temperature=1.3, top_p=1e-6),
        "min_p_1": params(temperature=0.9, min_p=1.0),
        "penalties": params(
            repetition_penalty=1.7, frequency_penalty=0.6, presence_penalty=0.4
        ),
        "logit_bias": params(logit_bias={7: 2.5, 9: -100.0, 11: 2.5}),
        "allowed": params(allowed_token_ids=[3, 5, 8, 13]),
        "logprobs": params(logprobs=3),
        "prompt_logprobs": params(prompt_logprobs=2),
        "regex": params(
            structured_outputs=StructuredOutputsParams(regex="[ab]{3}c[0-9]{4}"),
            ignore_eos=False,
        ),
        # Longer than the 32 tokens of a step: prefill in chunks.
        "chunked": greedy,
    }
    if runner == "v2":
        # V1 on CPU fails on a request's own seed ("does not use offset").
        cases["seeded"] = params(temperature=1.0, seed=1234, max_tokens=20)
        cases["seeded_again"] = cases["seeded"]
        cases["other_seed"] = params(temperature=1.0, seed=1235, max_tokens=20)
    lengths = {"chunked": 90, "prompt_logprobs": 50}
    seeds = {name: i for i, name in enumerate(cases)}
    seeds["seeded_again"] = seeds["other_seed"] = seeds.get("seeded", 0)
    prompts = [_prompt(seeds[name], lengths.get(name, 11)) for name in cases]
    outputs = llm.generate(prompts, list(cases.values()), use_tqdm=False)
    results = {
        name: _result(output) for name, output in zip(cases, outputs, strict=True)
    }
    # What the greedy text contains decides what the next requests forbid.
    written = results["greedy"]["tokens"]
    bad = params()
    bad._bad_words_token_ids = [written[2:4], [written[7]]]
    more = {
        "bad_words": bad,
        "min_tokens": params(stop_token_ids=[written[1]], min_tokens=6),
        "no_min_tokens": params(stop_token_ids=[written[1]]),
    }
    outputs = llm.generate(
        [_prompt(seeds["greedy"], 11)] * len(more), list(more.values()), use_tqdm=False
    )
    for name, output in zip(more, outputs, strict=True):
        results[name] = _result(output)
    return results


def _result(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    result: dict[str, Any] = {
        "tokens": list(completion.token_ids),
        "text": completion.text,
    }
    if completion.logprobs:
        result["logprobs"] = [_logprobs(step) for step in completion.logprobs]
    if output.prompt_logprobs:
        result["prompt_logprobs"] = [
            _logprobs(step) for step in output.prompt_logprobs if step
        ]
    return result


def _logprobs(step: Any) -> list[list[float]]:
    return sorted([token, entry.logprob, entry.rank] for token, entry in step.items())


def main() -> None:
    """The program ``v1|v2 MODEL OUTPUT.json``."""
    runner, model, output = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    kwargs = {}
    if runner == "v2":
        from vllm_specinfer.hooks import cpu_v2

        cpu_v2.enable_in_frontend()
        kwargs["worker_cls"] = "vllm_specinfer.hooks.cpu_v2_worker.CPUV2Worker"
    from vllm import LLM

    llm = LLM(
        model,
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        block_size=32,
        async_scheduling=False,
        enable_prefix_caching=False,
        **kwargs,
    )
    runner_class = llm.llm_engine.engine_core.engine_core.model_executor
    runner_class = type(runner_class.driver_worker.worker.model_runner)
    results = _decode(llm, runner)
    results["runner"] = f"{runner_class.__module__}.{runner_class.__qualname__}"
    Path(output).write_text(json.dumps(results))
