"""Schedulers: predicted and actual matched lengths, tokens/s beside an oracle's.

Each set of prompts is recorded with a wide tree, a predictor is fitted to three fourths
of it, and the schedulers run through the held-out fourth (`evidence/replay.py`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specinfer import assets
from vllm_specinfer.evidence.fit import check_prompts, fit_scheduler
from vllm_specinfer.evidence.record import Answers, record
from vllm_specinfer.evidence.simulate import Costs

# SmolLM2-135M with the shipped SSM on two cores, in times of a step of one token.
USUAL_COSTS = Costs(
    rows=np.array([1.0, 8.0, 16.0, 32.0, 64.0]),
    seconds=np.array([1.0, 1.26, 1.7, 2.2, 3.2]),
    level_seconds=0.07,
)
_RATE = "tokens/s over plain"


def scheduler(
    sets: Sequence[Answers],
    ssm: str,
    tree: str,
    size: int,
    costs: Costs,
    num_nodes: int,
    out: Path,
) -> list[dict[str, Any]]:
    """A row per set of prompts and scheduler; traces and predictors stay in the folder.

    Args:
        sets: What is recorded, at the first temperature of each.
        ssm: What is `model` in a speculative config.
        tree: The expansion that is recorded.
        size: Hidden units of the predictors.
        costs: What steps take.
        num_nodes: Most nodes of a compared tree.
        out: The folder.

    Raises:
        ValueError: The input cannot be used.
        OSError: A file is missing or the disk is full.
    """
    names = [Path(answers.prompts).stem for answers in sets]
    if len(set(names)) < len(names):
        raise ValueError(f"prompts must have distinct names; got {', '.join(names)}")
    costs.check_reach(1 + num_nodes)
    for answers in sets:
        found = assets.prompt_ids(answers.prompts, answers.max_prompts, answers.target)
        check_prompts(answers.prompts, len(found))
    rows = []
    for name, answers in zip(names, sets, strict=True):
        trace = out / f"trace-{name}.jsonl"
        record(trace, answers, ssm, tree, answers.temperatures[0])
        fitted = fit_scheduler(
            [trace],
            out / f"predictor-{name}.json",
            size=size,
            sizes=(0,),
            costs=costs,
            num_nodes=num_nodes,
        )
        static, *_, oracle = fitted.schedulers
        for row in fitted.schedulers:
            compared = {key: value for key, value in row.items() if key != "trace"}
            compared["over best static"] = row[_RATE] / static[_RATE]
            compared["of the oracle's"] = row[_RATE] / oracle[_RATE]
            rows.append({"prompts": name, **compared})
    return rows
