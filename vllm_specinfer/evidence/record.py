"""Recording a trace: an engine with a wide tree writes down what it verifies."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from vllm.v1.core.sched.output import NewRequestData

from vllm_specinfer import assets
from vllm_specinfer.drafting.source import DraftStep
from vllm_specinfer.drafting.sources import Drafts, SourceSet
from vllm_specinfer.evidence.engines import (
    check_cpu,
    check_one_worker,
    runner_of,
    start_engine,
    tree_counts,
    worker_of,
)
from vllm_specinfer.evidence.tables import write_csv
from vllm_specinfer.evidence.trace import step_line
from vllm_specinfer.options import METHOD
from vllm_specinfer.parse_trees import parse_tree
from vllm_specinfer.results import made_by
from vllm_specinfer.scheduling.start_costs import MOST_ROWS

MAX_NUM_SEQS = 8
# How often each size of a pass is measured, and which is a level's.
COST_ROUNDS, LEVEL_ROWS = 7, 4
MORE_ROOM = "raise VLLM_CPU_KVCACHE_SPACE, max_model_len or max_num_batched_tokens"


class Recorder:
    """Writes a line for every tree that is verified, from a source set's own calls.

    Attributes:
        num_steps: Trees that were verified.
        num_nodes: Their nodes.
        num_accepted: Those of them on the target's path.
        num_cut: Trees whose last nodes had no rows, which are not written.
    """

    def __init__(self, sources: SourceSet, file: TextIO) -> None:
        """Listen to the sources of an engine.

        Args:
            sources: The engine's.
            file: Where the lines go.
        """
        self.num_steps = self.num_nodes = self.num_accepted = self.num_cut = 0
        self._file = file
        self._numbers: dict[str, int] = {}
        # By slot: its request's number; parents and scores of its last tree.
        self._requests: dict[int, int] = {}
        self._trees: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._start, self._propose = sources.start, sources.propose
        self._observe = sources.experience.observe
        sources.start, sources.propose = self._on_start, self._on_propose
        sources.experience.observe = self._on_verified

    def _on_start(self, slot: int, request: NewRequestData) -> None:
        number = self._numbers.setdefault(request.req_id, len(self._numbers))
        self._requests[slot] = number
        self._start(slot, request)

    def _on_propose(self, step: DraftStep, *args: Any) -> Drafts:
        drafts = self._propose(step, *args)
        slots, trees = step.slots[step.growing].tolist(), drafts.trees
        for slot, parents, scores in zip(
            slots, trees.parents, trees.scores, strict=True
        ):
            size = np.isfinite(scores).sum()
            self._trees[slot] = parents[:size], scores[:size]
        return drafts

    def _on_verified(self, slot: int, accepted: list[int], num_rows: int) -> None:
        parents, scores = self._trees.pop(slot)
        if num_rows < len(parents):
            self.num_cut += 1
        else:
            line = step_line(self._requests[slot], parents, scores, accepted)
            self._file.write(line)
        self.num_steps += 1
        self.num_nodes += min(num_rows, len(parents))
        self.num_accepted += len(accepted)
        self._observe(slot, accepted, num_rows)


@dataclass(frozen=True)
class Answers:
    """What an engine answers.

    Attributes:
        target: Folder or hub id.
        prompts: As `assets.prompt_ids` takes them.
        temperatures: All prompts are answered at each.
        max_prompts: Spread over the prompts; 0 for all.
        max_tokens: Of each answer.
        engine: Further arguments of `vllm.LLM`.
    """

    target: str
    prompts: str
    temperatures: Sequence[float]
    max_prompts: int
    max_tokens: int
    engine: dict[str, Any]


def record(
    out: Path,
    answers: Answers,
    ssm: str,
    tree: str,
    temperature: float,
    costs: Path | None = None,
) -> tuple[str, float]:
    """Answer prompts with a wide tree in every step and write the trace.

    Args:
        out: The trace; it appears once it is whole.
        answers: What is answered.
        ssm: What is `model` in a speculative config: an SSM, a pool, a lookup.
        tree: The expansion.
        temperature: Of each answer; each prompt has a seed of its own.
        costs: On a CPU, where what steps take is written (`write_costs`); None for
            nowhere.

    Returns:
        How many steps it has, and what `write_costs` does, 0 without it.

    Raises:
        ValueError: The input cannot be used, or vLLM counted other trees.
        OSError: A file is missing or the disk is full.
    """
    from vllm import SamplingParams

    check_one_worker(answers.engine)
    shape = parse_tree(tree)
    prompts = assets.prompt_ids(answers.prompts, answers.max_prompts, answers.target)
    room = max(map(len, prompts)) + answers.max_tokens + shape.num_nodes + 1
    config = {"method": METHOD, "model": ssm, "tree": shape.widths}
    config["scheduler"] = "static"
    # What is drafted for ahead of the host does not pass by the recorder.
    engine = {**answers.engine, "async_scheduling": False}
    if costs is not None:
        check_cpu("costs-out")
    llm = start_engine(answers.target, room, MAX_NUM_SEQS, config, engine)
    most_rows = 1 + shape.num_nodes
    level_seconds = 0.0 if costs is None else write_costs(costs, llm, most_rows)
    params = [
        SamplingParams(temperature=temperature, max_tokens=answers.max_tokens, seed=i)
        for i in range(len(prompts))
    ]
    about = {
        "target": answers.target,
        "ssm": ssm,
        "prompts": answers.prompts,
        "tree": shape.widths,
        "temperature": temperature,
        "max_tokens": answers.max_tokens,
        **made_by(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".unfinished")
    with unfinished.open("w") as file:
        file.write(json.dumps(about) + "\n")
        recorder = Recorder(runner_of(llm).speculator.sources, file)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    _check(llm, recorder)
    unfinished.replace(out)
    whole = recorder.num_steps - recorder.num_cut
    said = f"{whole} steps"
    if recorder.num_cut:
        said += f", without {recorder.num_cut} whose trees were cut: {MORE_ROOM}"
    return said, level_seconds


def write_costs(out: Path, llm: Any, most_rows: int) -> float:
    """Measure passes of made-up tokens, as a CSV for `simulate`.

    Args:
        out: Gets rows of a pass and the target's seconds, medians.
        llm: An engine on a CPU, whose SSMs run along.
        most_rows: The largest pass has as many at least.

    Returns:
        Seconds of the SSMs' passes over so many rows as a level has, the median.
    """
    worker = worker_of(llm)
    largest = worker.vllm_config.scheduler_config.max_num_batched_tokens
    most_rows = min(max(most_rows, MOST_ROWS), largest)
    sizes = [1 << k for k in range((most_rows - 1).bit_length())] + [most_rows]
    found: dict[int, list[tuple[float, float]]] = {rows: [] for rows in sizes}
    for _ in range(COST_ROUNDS):
        for rows in sizes:
            found[rows].append(worker.time_pass(rows))
    seconds = {rows: np.median(pairs, axis=0).tolist() for rows, pairs in found.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_csv(out, [{"rows": rows, "seconds": s[0]} for rows, s in seconds.items()])
    return seconds[LEVEL_ROWS][1]


def _check(llm: Any, recorder: Recorder) -> None:
    """Raises ValueError where vLLM's own counters differ, or no tree was whole."""
    counted = tree_counts(llm)
    found = [recorder.num_steps, recorder.num_nodes, recorder.num_accepted]
    if counted != found:
        raise ValueError(
            "vLLM must count the trees, nodes and accepted nodes that are recorded, "
            f"{found}; got {counted}"
        )
    if recorder.num_steps == recorder.num_cut:
        raise ValueError(
            f"trees must be verified whole; got {recorder.num_cut} cut ones: "
            f"{MORE_ROOM}"
        )
