"""Mixed requests for CUDA's path in Triton's interpreter: texts of plain decoding.

    TRITON_INTERPRET=1 python -m tests.e2e.interpreted_soak --minutes 20

Each round is an engine with asynchronous scheduling, other requests, other sources,
another scheduler, few or many KV blocks, prompts in larger or smaller pieces, and SSMs
that may rest in some steps, or trees that may be smaller by the batch. Where draws are
tested, sampled texts are those of the CPU's engine, as long as nothing that either
learns or lacks, blocks or rows, comes between. Not part of CI.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import interpreter

from tests.e2e.interpreted import LLM, TREE
from tests.e2e.models import noisy_copy, tiny_llama, untrained_head
from tests.e2e.soak import the_requests

# These need a tokenizer.
TEXT_ONLY = ("stop", "bad_words")
NUM_REQUESTS = 8


def main() -> None:
    """Run rounds until the time is over; fails at the first wrong text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="sources")
    args = parser.parse_args()
    interpreter.prepare()
    from tests import processes
    from tests.e2e import engine
    from tests.e2e.interpreted_worker import cuda_path, resting_ssms
    from vllm_specinfer import plugin
    from vllm_specinfer.options import TESTS_DRAWS

    os.environ.update(processes.ENV)
    plugin.register()
    folder = Path(tempfile.mkdtemp())
    target = tiny_llama(folder / "target", seed=0)
    ssm = noisy_copy(target, folder / "ssm", noise=0.05)
    head = untrained_head(target, folder / "head")
    few = {"model": target, "num_speculative_tokens": 2}
    tree = {"tree": TREE, "num_speculative_tokens": 7}
    sources = {
        "one SSM": {"model": ssm, "tree": "2,2"},
        "two SSMs": {"ssms": [ssm, few], **tree},
        "naive": {"model": ssm, "verification": "naive", "tree": "2,2"},
        "mss": {"ssms": [ssm, few], **tree, "verification": "mss"},
        "rrs": {"ssms": [ssm, few], **tree, "verification": "rrs"},
        "mss and suffix": {"ssms": [ssm, "suffix"], **tree, "verification": "mss"},
        "head": {"model": head},
        "SSM and head": {"ssms": [ssm, head], **tree},
        "SSM and suffix": {"ssms": [ssm, "suffix"], **tree},
        "SSM and ngram": {"ssms": [ssm, "ngram"], **tree},
        "lookups": {"ssms": ["ngram", "suffix"], "num_speculative_tokens": 7},
    }
    end, seed = time.monotonic() + 60 * args.minutes, args.seed
    while time.monotonic() < end:
        rng = random.Random(seed)
        name, spec = rng.choice(list(sources.items()))
        if args.only:
            name, spec = args.only, sources[args.only]
        options = {"scheduler": rng.choice(["static", "auto"])}
        if rng.random() < 0.3:
            by_batch = [[n, n, rng.randint(0, 4)] for n in (1, 2, 3)]
            options["num_speculative_tokens_per_batch_size"] = by_batch
        blocks = rng.choice([5, 7, 64])
        llm = {**LLM, "max_num_seqs": 3, "num_gpu_blocks_override": blocks}
        llm["max_num_batched_tokens"] = rng.choice([24, 32, 64])
        llm["long_prefill_token_threshold"] = rng.choice([0, 0, 5])
        # Of static budgets; all others ask when it pays.
        rests = options["scheduler"] == "static" and rng.random() < 0.5
        asks = "".join(rng.choice("+-") for _ in range(5)) if rests else "+"
        job = {
            "llm": {"model": target, **llm},
            "prompts": [r.prompt[:90] for r in the_requests(NUM_REQUESTS, seed)],
            "params": [_params(r.params) for r in the_requests(NUM_REQUESTS, seed)],
        }
        # In a process that has not taken CUDA's path.
        config = {"method": "specinfer", **options, **spec}
        with_trees = {**job["llm"], "speculative_config": config}
        tests_draws = spec.get("verification") in TESTS_DRAWS
        plain, of_cpu = engine.run(
            [{**job, "plain_v2": True}, {**job, "llm": with_trees}]
        )
        with cuda_path() as counts, resting_ssms(asks):
            (found,) = engine._run_jobs(
                [{**job, "llm": with_trees, "asynchronous": True}]
            )
        ahead = [step for step in counts.steps if step["ahead"]]
        # Log probabilities wait in verification.
        waits = sum(step["launch"] for step in ahead)
        print(
            f"seed {seed}: {name}, {options}, {blocks} blocks, steps of "
            f"{llm['max_num_batched_tokens']}, SSMs asked {asks}: "
            f"{len(counts.steps)} steps, {len(ahead)} ahead with {waits} waits, "
            f"{found['preemptions']} preemptions, {found['drafts']} trees, "
            f"{found['accepted']} nodes accepted",
            flush=True,
        )
        short = found["preemptions"] or any(
            of["metrics"]["short_steps"] for of in (of_cpu, found)
        )
        short = short or llm["max_num_batched_tokens"] < 64  # trees are cut
        same = not short and options["scheduler"] == "static" and not rests
        for i, params in enumerate(job["params"]):
            right = plain
            if tests_draws and params["temperature"]:
                right = of_cpu if same else found
            text, right = found["tokens"][i], right["tokens"][i]
            assert text == right, (i, params, text, right)
        assert found["free_blocks"] == plain["free_blocks"]
        assert waits == 0
        seed += 1


def _params(params: dict) -> dict:
    """As many as fit, and nothing about text."""
    kept = {k: v for k, v in params.items() if k not in TEXT_ONLY}
    return {**kept, "max_tokens": min(params["max_tokens"], 30)}


if __name__ == "__main__":
    main()
