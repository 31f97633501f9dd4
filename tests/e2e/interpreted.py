"""An engine that takes CUDA's path on a CPU, its kernels run by Triton's interpreter.

``TRITON_INTERPRET=1 python -m tests.e2e.interpreted TARGET SSM HEAD WINDOWED ITS_SSM
VISION OUTPUT.json``

Tree attention, vLLM's attention to prompts, its K/V writes and the commit are Triton
kernels; what crosses between host and device is copied, never shared. vLLM's small step
kernels are the CPU's.
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import interpreter

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "seed": 3, "max_tokens": 8, "ignore_eos": True}
PENALISED = {**GREEDY, "max_tokens": 20, "repetition_penalty": 1.5, "logprobs": 2}
# What looks back at the tokens before, and a grammar.
LOOKING_BACK = [
    {**GREEDY, "max_tokens": 14, "extra_args": {"two_back": 2.0}},
    {**SAMPLED, "max_tokens": 14, "presence_penalty": 1.0, "logprobs": 1},
    {
        **SAMPLED,
        "max_tokens": 14,
        "structured_outputs": {"regex": "([a-f]{2,5}-[0-9]{1,4} ){3,6}"},
    },
]
LONG = {**GREEDY, "max_tokens": 30}
LONGER, LONGEST = {"max_tokens": 16}, {"max_tokens": 20}
# The second one is read in two pieces, the last two are shorter than a tree is deep.
PROMPTS = [3 * [5, 17, 40, 2], [(7 * i) % 96 for i in range(30)], [9, 8], [3]]
TREE = {"max_depth": 4, "max_width": 3, "min_probability": 0}

LLM = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 2,
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 64,
    # Half of it is for two trees while there are prompts, which asynchronous scheduling
    # has in other steps.
    "max_num_batched_tokens": 36,
}


def main() -> None:
    """Decode with and without trees and save the texts and what was counted."""
    interpreter.prepare()
    from tests import processes
    from tests.e2e import engine
    from tests.e2e.interpreted_worker import changing_sizes, cuda_path, resting_ssms
    from tests.e2e.models import IMAGE, IMAGE_BEGINS, IMAGE_ENDS
    from vllm_specinfer import plugin
    from vllm_specinfer.drafting import graphs
    from vllm_specinfer.verify import device_sampler

    target, ssm, head, windowed, windowed_ssm, vision, output = sys.argv[1:]
    os.environ.update(processes.ENV)
    plugin.register()
    llm = {"model": target, **LLM}
    # The target itself knows best; how little it gets is left to the other one.
    few = {"model": target, "num_speculative_tokens": 2}
    pair = {"ssms": [ssm, few], "tree": TREE, "num_speculative_tokens": 7}
    common = {"method": "specinfer", "scheduler": "static", "tree": "2,2"}
    everything = {"prompts": PROMPTS, "params": [GREEDY, GREEDY, PENALISED, SAMPLED]}
    greedy = {"prompts": PROMPTS[:1], "params": [GREEDY]}
    # One of them arrives while another one decodes, and is read in pieces beside it.
    arriving = {
        "prompts": [*PROMPTS[:2], PROMPTS[1][::-1], *PROMPTS[2:]],
        "params": [GREEDY, {**GREEDY, "max_tokens": 13}, *3 * [GREEDY]],
    }
    probable = {**GREEDY, "max_tokens": 16, "logprobs": 1}
    tested = {"prompts": PROMPTS[:2], "params": [SAMPLED, probable]}
    nucleus = {**SAMPLED, "temperature": 0.7, "top_p": 0.9, "max_tokens": 10}
    drawn = {"prompts": PROMPTS[:2], "params": [SAMPLED, nucleus]}
    longer, ahead = (
        {"prompts": PROMPTS[:2], "params": [{**GREEDY, **most}, {**SAMPLED, **most}]}
        for most in (LONGER, LONGEST)
    )
    back = {"prompts": PROMPTS[:3], "params": LOOKING_BACK}
    needs = {"logits_processors": ["tests.e2e.processors:TwoBack"]}
    needs["skip_tokenizer_init"] = False
    # The second time each text is known.
    again = {name: 2 * both for name, both in longer.items()}
    jobs = {
        name: {
            **job,
            "llm": {**llm, "speculative_config": {**common, **spec}},
            "scores": True,
        }
        for name, job, spec in (
            ("coupled", everything, {"model": ssm}),
            ("asynchronous", {**everything, "asynchronous": True}, {"model": ssm}),
            ("ahead", {**ahead, "asynchronous": True}, pair),
            (
                "back",
                {**back, "asynchronous": True},
                {"model": ssm, "tree": "3,2,1"},
            ),
            (
                "suffix",
                {**again, "asynchronous": True},
                {"ssms": [ssm, "suffix"], "num_speculative_tokens": 8},
            ),
            (
                "mss",
                {**tested, "asynchronous": True},
                {"model": ssm, "verification": "mss"},
            ),
            (
                "rrs",
                {**drawn, "asynchronous": True},
                {**pair, "verification": "rrs"},
            ),
            (
                "two",
                {**greedy, "asynchronous": True},
                {"ssms": [ssm, head], "tree": TREE},
            ),
            (
                "eagle",
                {**arriving, "asynchronous": True},
                {"model": head, "tree": "2,1,2"},
            ),
        )
    }
    jobs["back"]["llm"] |= needs
    # What follows within a text, and what did in one before.
    one_token = {**GREEDY, "max_tokens": 16, "allowed_token_ids": [7]}
    repeated = {
        "prompts": [*PROMPTS[:2], PROMPTS[1]],
        "params": [one_token, *2 * [{**SAMPLED, "max_tokens": 12}]],
    }
    ngram = {"model": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    spec = {**common, "ssms": [ngram, "suffix"], "num_speculative_tokens": 5}
    lookups = {**repeated, "llm": {**llm, "speculative_config": spec}, "scores": True}
    # Layers with and without a sliding window take turns.
    spec = {**common, "model": windowed_ssm}
    # The sampled request ends soon: graphs for greedy ones run then.
    params = [{**GREEDY, "max_tokens": 16}, {**SAMPLED, "max_tokens": 4}]
    behind = {"prompts": [3 * PROMPTS[1], PROMPTS[0]], "params": params}
    windows = {**llm, "model": windowed}
    in_windows = {**behind, "llm": {**windows, "speculative_config": spec}}
    # Behind an image a text has fewer positions than tokens (M-RoPE).
    seeing = {**llm, "model": vision, "skip_tokenizer_init": False}
    seen = {
        "prompts": [[3, IMAGE_BEGINS, IMAGE, IMAGE_ENDS, 8], PROMPTS[2]],
        "params": [{**GREEDY, "max_tokens": 12}, SAMPLED],
        "images": [[8, 12], None],
    }
    spec = {**common, "model": vision}
    of_images = {**seen, "llm": {**seeing, "speculative_config": spec}}
    plain = {"llm": llm, "plain_v2": True, **everything}
    on_cpu = {"plain": plain, "tested": {**plain, **tested}}
    on_cpu["long"] = {**plain, **ahead}
    on_cpu["arriving"] = {**plain, **arriving}
    on_cpu["windows"] = {**plain, **behind, "llm": windows}
    on_cpu["images"] = {**plain, **seen, "llm": seeing}
    on_cpu["back"] = {**plain, **back, "llm": {**llm, **needs}}
    on_cpu["known"] = {**plain, **longer}
    on_cpu |= {"repeated": {**plain, **repeated}, "lookups": lookups}
    for name in ("mss", "rrs", "coupled", "two", "eagle", "ahead"):
        on_cpu[name] = {**jobs[name], "asynchronous": False}
    of_cpu = dict(zip(on_cpu, engine._run_jobs(list(on_cpu.values())), strict=True))
    resting = {**jobs["eagle"], "prompts": PROMPTS[:1], "params": [LONG]}
    with resting_ssms():
        (of_cpu["resting"],) = engine._run_jobs([{**resting, "asynchronous": False}])
    # The head sits out the first of three pieces, and the first token behind them.
    pieces = {**resting, "prompts": [3 * PROMPTS[1]], "params": [{**GREEDY, **LONGER}]}
    with resting_ssms("-++"):
        (of_cpu["pieces"],) = engine._run_jobs([{**pieces, "asynchronous": False}])
    # Rows of a step are sampled six at a time there.
    few_logits = mock.patch.object(device_sampler, "MAX_CHUNK_BYTES", 6 * 96 * 4)
    with cuda_path() as counts, few_logits:
        found = dict(zip(jobs, engine._run_jobs(list(jobs.values())), strict=True))
        with resting_ssms(), changing_sizes():
            (found["changing"],) = engine._run_jobs([jobs["suffix"]])
    with cuda_path() as of_resting, resting_ssms():
        (found["resting"],) = engine._run_jobs([resting])
    with cuda_path() as of_pieces, resting_ssms("-++"):
        (found["pieces"],) = engine._run_jobs([pieces])
    with cuda_path():
        (found["windows"],) = engine._run_jobs([{**in_windows, "asynchronous": True}])
    with cuda_path():
        (found["images"],) = engine._run_jobs([{**of_images, "asynchronous": True}])
    with cuda_path() as of_lookups:
        (found["lookups"],) = engine._run_jobs([{**lookups, "asynchronous": True}])
    # With graphs of one request, and without.
    one = [{**jobs["asynchronous"], **ahead}]
    decode_only = cuda_path("FULL_DECODE_ONLY")
    with decode_only as of_small, mock.patch.object(graphs, "MOST_ROWS", 1):
        (found["small graphs"],) = engine._run_jobs(one)
    with cuda_path("NONE"):
        (found["eager"],) = engine._run_jobs(one)
    counts = (counts, of_lookups, of_resting, of_pieces, of_small)
    counts = [each._asdict() for each in counts]
    Path(output).write_text(json.dumps([of_cpu, found, *counts]))


if __name__ == "__main__":
    main()
