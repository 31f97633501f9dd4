"""Tables 2 and 3 and the number of SSMs: tokens per step of configurations.

All prompts are answered by one engine after the other, each with all its nodes in every
step, each request with a seed of its own. Tokens per step do not depend on the machine;
tokens/s want a quiet one.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vllm_specinfer import assets
from vllm_specinfer.evidence.engines import (
    ROOM_FOR_DRAFTS,
    StepLog,
    forget,
    num_steps,
    start_engine,
    tree_counts,
)
from vllm_specinfer.evidence.record import MAX_NUM_SEQS, Answers
from vllm_specinfer.evidence.tables import Rows
from vllm_specinfer.options import METHOD
from vllm_specinfer.parsing import parse_options

WIDER = 8  # nodes of a level
# Of a pool's SSMs; all of them have the tree that is compared.
KEPT = ("revision", "quantization", "type")


def table2(answers: Answers, ssm: str, widths: Sequence[int]) -> Iterator[Rows]:
    """Tokens per step by the width of the paper's tree, 1,1,k,1,1,1,1,1."""
    configs = {k: {"model": ssm, "tree": [1, 1, k, *[1] * 5]} for k in widths}
    return measure(answers, "width", configs)


def table3(
    answers: Answers, ssm: str, rules: Sequence[str], nodes: int
) -> Iterator[Rows]:
    """Tokens per step by verification rule; "naive" has the trees of "mss"."""
    common = {"model": ssm, "num_speculative_tokens": nodes}
    return measure(
        answers, "rule", {rule: {**common, "verification": rule} for rule in rules}
    )


def ssms(answers: Answers, pools: Sequence[str], nodes: int) -> Iterator[Rows]:
    """Tokens per step of the first SSMs of each pool, and of its first one, wider.

    Raises:
        ValueError: A pool has no SSM.
    """
    names = [Path(pool).name for pool in pools]
    if len(set(names)) < len(names):
        raise ValueError(f"pools must have distinct names; got {', '.join(names)}")
    configs: dict[str, dict[str, Any]] = {}
    for name, pool in zip(names, pools, strict=True):
        models = [
            {key: getattr(ssm, key) for key in ("model", *KEPT) if getattr(ssm, key)}
            for ssm in parse_options({"model": pool}).ssms
        ]
        if not models:
            raise ValueError(f"a pool must hold at least one SSM; got none in {pool}")
        for n in range(1, len(models) + 1):
            configs[f"{name}: {n}"] = {"ssms": models[:n]}
        wider = {"ssms": models[:1], "tree": {"max_width": WIDER}}
        configs[f"{name}: 1, wider"] = wider
    common = {"num_speculative_tokens": nodes}
    return measure(answers, "SSMs", {k: {**common, **v} for k, v in configs.items()})


def measure(
    answers: Answers, label: str, configs: dict[Any, dict[str, Any]]
) -> Iterator[Rows]:
    """A row per configuration and temperature.

    Args:
        answers: What every engine answers.
        label: The key of the configurations' names in the rows.
        configs: Speculative configs by name, without the method.

    Yields:
        The rows so far.

    Raises:
        ValueError: The input cannot be used, or all answers are a single token.
        OSError: A file is missing.
    """
    from vllm import SamplingParams

    prompts = assets.prompt_ids(answers.prompts, answers.max_prompts, answers.target)
    configs = {
        name: {"method": METHOD, "scheduler": "static", **config}
        for name, config in configs.items()
    }
    parsed = [parse_options(config) for config in configs.values()]
    room = max(ROOM_FOR_DRAFTS, 1 + max(p.num_speculative_tokens for p in parsed))
    longest = max(map(len, prompts)) + answers.max_tokens + room
    rows = []
    for name, config in tqdm(configs.items(), desc="engines"):
        llm = start_engine(
            answers.target, longest, MAX_NUM_SEQS, config, answers.engine
        )
        log = StepLog(llm)
        for temperature in answers.temperatures:
            forget(llm)
            log.restart()
            params = [
                SamplingParams(
                    temperature=temperature, max_tokens=answers.max_tokens, seed=i
                )
                for i in range(len(prompts))
            ]
            before, started = tree_counts(llm), time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
            took = time.perf_counter() - started
            num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
            _, nodes, _ = np.subtract(tree_counts(llm), before).tolist()
            steps = num_steps(log.counts)
            rows.append(
                {
                    label: name,
                    "temperature": temperature,
                    "tokens per step": sum(log.counts.elements()) / steps,
                    "nodes per step": nodes / steps,
                    "tokens/s": num_tokens / took,
                }
            )
            yield rows
        del llm
        gc.collect()
