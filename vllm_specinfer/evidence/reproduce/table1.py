"""Table 1: how often the target's token is among the SSM's k best.

A trace is recorded with k children below the root and below each of them. Tested is
every position whose k children were verified: those after the root, and those after an
accepted node. Only the position after two accepted nodes is never tested.

At a temperature above 0 the SSM's best are those under the noise of the request, as
"coupled" drafts them; the paper ranks by the SSM's chances alone.

Dimension legend: S recorded steps, C nodes of a recorded tree, K children.
"""

from pathlib import Path
from typing import Any

import numpy as np

from vllm_specinfer.evidence.record import Answers, record
from vllm_specinfer.evidence.trace import Trace, read_trace
from vllm_specinfer.options import SSMSource
from vllm_specinfer.parsing import parse_options
from vllm_specinfer.tree.candidates import NO_TOKEN


def table1(answers: Answers, ssm: str, most: int, out: Path) -> list[dict[str, Any]]:
    """A row per temperature and k; traces stay in the folder.

    Args:
        answers: What is recorded.
        ssm: An SSM, or a pool of it alone.
        most: The largest k.
        out: The folder.

    Raises:
        ValueError: The input cannot be used.
        OSError: A file is missing or the disk is full.
    """
    sources = parse_options({"model": ssm}).sources
    if len(sources) > 1 or not isinstance(sources[0], SSMSource):
        names = ", ".join(source.name for source in sources)
        raise ValueError(f"table1 needs one SSM and nothing beside it; got {names}")
    rows = []
    for temperature in answers.temperatures:
        file = out / f"trace-{temperature:g}.jsonl"
        record(file, answers, ssm, f"{most},{most}", temperature)
        tested, rates = hit_rates(read_trace(file))
        for k, rate in enumerate(rates.tolist(), start=1):
            row = {"temperature": temperature, "k": k, "hit rate": rate}
            rows.append({**row, "positions": tested})
    return rows


def hit_rates(trace: Trace) -> tuple[int, np.ndarray]:
    """Tested positions, and [K] the part of them that the k best hit.

    Args:
        trace: Of a tree with as many children on each level.
    """
    children = trace.children  # [S, C + 1, K]; row 0 is the root
    on_path = np.pad(trace.on_path, ((0, 0), (1, 0)), constant_values=True)
    tested = on_path & (children != NO_TOKEN).any(axis=2)
    steps = np.arange(len(children))[:, None, None]
    hits = trace.on_path[steps, children] & (children != NO_TOKEN)
    return int(tested.sum()), hits[tested].mean(axis=0).cumsum()
