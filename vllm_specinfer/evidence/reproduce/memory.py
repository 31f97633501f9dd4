"""Memory beyond weights and K/V, by nodes; the goal is at most 2% of the K/V.

One process per engine, eager: its peak resident memory while it answers, less its
weights and its KV cache, every page of which is touched before. Shown is how much more
that is than plain vLLM's. It holds what a step needs for a moment, above all logits:
requests x (nodes + 1) x vocabulary x 4 bytes.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_specinfer.evidence.engines import (
    check_arguments,
    check_cpu,
    check_one_worker,
    cpu_kv_cache,
    in_a_process,
    runner_of,
)
from vllm_specinfer.evidence.tables import Rows

MIB = 1 << 20
MAX_TOKENS = 16


def memory(
    target: str,
    ssm: str,
    nodes: Sequence[int],
    batches: Sequence[int],
    engine: dict[str, Any],
) -> Iterator[Rows]:
    """A row per batch and number of nodes, sizes in MiB.

    Args:
        target: Folder or hub id.
        ssm: What is `model` in a speculative config.
        nodes: Of every tree.
        batches: Requests at once.
        engine: Further arguments of `vllm.LLM`.

    Yields:
        The rows so far.

    Raises:
        ValueError: The input cannot be used.
    """
    check_cpu("memory")
    check_arguments(engine)
    check_one_worker(engine)
    rows = []
    with tqdm(total=len(batches) * (1 + len(nodes)), desc="engines") as bar:
        for batch in batches:
            plain, _ = in_a_process(_measure, target, None, 0, batch, engine)
            bar.update()
            for n in nodes:
                rest, kv = in_a_process(_measure, target, ssm, n, batch, engine)
                bar.update()
                more = rest - plain
                row = {"batch": batch, "nodes": n, "MiB more than plain": more / MIB}
                row |= {"MiB of K/V": kv / MIB, "% of K/V": 100 * more / kv}
                rows.append(row)
                yield rows


def _measure(
    target: str, ssm: str | None, nodes: int, batch: int, engine: dict[str, Any]
) -> tuple[int, int]:
    """Peak bytes beyond weights and K/V, and bytes of K/V."""
    from vllm import LLM, SamplingParams

    config = None
    if ssm is not None:
        # Full trees: nothing is dropped for being unlikely.
        depth, width = min(8, nodes), min(max(4, nodes // 4), nodes)
        tree = {"max_depth": depth, "max_width": width, "min_probability": 0}
        config = {"method": "specinfer", "model": ssm, "tree": tree}
        config |= {"num_speculative_tokens": nodes, "scheduler": "static"}
    llm = LLM(
        **{
            "model": target,
            "max_model_len": 512,
            "max_num_seqs": batch,
            "enforce_eager": True,
            "speculative_config": config,
            **cpu_kv_cache(),
            **engine,
        }
    )
    runner = runner_of(llm)
    for cache in runner.kv_caches:
        cache.zero_()
    storages = [cache.untyped_storage() for cache in runner.kv_caches]
    kv = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
    models = [runner.model]
    if ssm is not None:
        models += [source.ssm.model for source in runner.speculator.sources.ssms]
    tensors = (p for model in models for p in model.parameters())
    weights = {p.data_ptr(): p.nbytes for p in tensors}
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1 + i, 2, 3, 4]} for i in range(batch)]
    llm.generate(prompts, params, use_tqdm=False)
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024
    return peak - sum(weights.values()) - kv, kv
