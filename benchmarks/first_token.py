"""Time to the first token over plain vLLM's, of requests that come at once.

    python benchmarks/first_token.py [--batches 1 8 32] [--temperatures 0 1]
        [--contexts 0 2048] [--rounds 16] [--dtype bfloat16]

So many requests come to an idle engine, which has learned from `--texts` texts of the
same kind what drafting is worth. Prompts begin with the same tokens, so many together
with the prompt (0: none), which no engine has cached. A wait ends where a server sends
the token to its client, before the engine drafts (vllm/v1/engine/core.py,
`_process_engine_step`). All engines take the same prompts in turn; the ratio is that of
the mean waits of a round, medians with quartiles over the rounds. Under a steady load
waits depend on who else is in the engine.
"""

import argparse
import collections
import itertools
import random
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from load import POOL, wrong_ssm
from tqdm import tqdm

from vllm_specinfer import assets
from vllm_specinfer.evidence.engines import (
    core_of,
    forget,
    start_engine,
    stay_in_process,
)

PLAIN = "plain"
LONGEST = 2048


def mean_wait(llm: Any, prompts: list[list[int]], params: list[Any]) -> float:
    """Seconds until a request has its first token, the mean of all."""
    engine, core, waits, sent = llm.llm_engine, core_of(llm), {}, [0.0]
    start = time.perf_counter()
    for number, (ids, chosen) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), {"prompt_token_ids": ids}, chosen)

    def after_outputs(*args: Any, **kwargs: Any) -> None:
        sent[0] = time.perf_counter() - start
        post_step(*args, **kwargs)

    post_step = core.post_step
    with mock.patch.object(core, "post_step", after_outputs):
        while engine.has_unfinished_requests():
            for output in engine.step():
                waits.setdefault(output.request_id, sent[0])
    forget(llm)
    return float(np.mean(list(waits.values())))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--target", help="SmolLM2-135M where it is not given")
    parser.add_argument("--pool", type=Path, default=POOL, help="with the SSM")
    args = parser.parse_args()
    stay_in_process()
    from vllm import SamplingParams

    target = args.target or str(assets.smollm2())
    data = (assets.prompt_ids(name, model=target) for name in ("mtbench", "humaneval"))
    prompts = [ids for ids in sum(data, []) if len(ids) < LONGEST - 256]
    # More than vLLM's default, where plain vLLM crashes above T = 0 on a CPU.
    engine = {"dtype": args.dtype, "max_num_batched_tokens": 4 * LONGEST}
    longest = max(LONGEST, *(length + 256 for length in args.contexts))
    with tempfile.TemporaryDirectory() as folder:
        configs = {
            PLAIN: None,
            "good": {"method": "specinfer", "model": str(args.pool)},
            "wrong": {
                "method": "specinfer",
                "model": str(wrong_ssm(args.pool, Path(folder, "wrong"))),
            },
        }
        engines = {
            name: start_engine(target, longest, max(args.batches), config, engine)
            for name, config in tqdm(configs.items(), desc="starting engines")
        }
    print(
        "| context | T | batch | plain ms | good | wrong |\n|---|---|---|---|---|---|"
    )
    for length, temperature in itertools.product(args.contexts, args.temperatures):
        order, rng = collections.deque(engines), random.Random(0)
        behind = assets.with_context(prompts, length)
        texts = rng.sample(behind, args.texts)
        for llm in engines.values():
            params = SamplingParams(temperature=temperature, max_tokens=128, seed=0)
            llm.generate([{"prompt_token_ids": t} for t in texts], params, use_tqdm=0)
            forget(llm)
        for batch in args.batches:
            params = [
                SamplingParams(temperature=temperature, max_tokens=2, seed=i)
                for i in range(batch)
            ]
            waits: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(args.rounds + 1):
                chosen = rng.sample(behind, batch)
                for name in order:
                    waits[name].append(mean_wait(engines[name], chosen, params))
                order.rotate(-1)
            # The first one warms up.
            found = {name: np.array(seconds[1:]) for name, seconds in waits.items()}
            cells = [f"{1e3 * np.median(found[PLAIN]):.0f}"]
            for name in ("good", "wrong"):
                low, middle, high = np.quantile(
                    found[name] / found[PLAIN], (0.25, 0.5, 0.75)
                )
                cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            row = f"| {length} | {temperature:g} | {batch} | {' | '.join(cells)} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
