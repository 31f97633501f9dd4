"""Runs engines in processes of `tests/processes.py`.

A job is {"llm": {...}, "prompts": [[ids]], "params": [{...}], "batched": bool,
"mutation": name or null, "plain_v2": bool, "asynchronous": bool, "scores": bool,
"loras": [folder or null], "images": [[height, width] or null], "salts": [salt or null]
}; its result has the output token ids, texts and logprobs per prompt and the
speculation counts.
"""

import contextlib
import gc
import json
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from PIL import Image

from tests import processes
from tests.e2e.mutations import mutation
from vllm_specinfer.hooks import cpu_v2, speculative_config

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

# Enough for tiny models; an engine fills all of it with zeros.
KV_BYTES = 128 << 20
V2_WORKER = "tests.cpu_v2_worker.CPUV2Worker"


def tiny(model: str) -> dict:
    """Arguments of an engine for a tiny model, that starts soon."""
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 2,
        "kv_cache_memory_bytes": KV_BYTES,
    }


def run(jobs: list[dict], timeout: float = 1200, **env: str) -> list[dict]:
    """Run jobs one after the other; their results.

    Args:
        jobs: What to run.
        timeout: Seconds for all of them.
        env: More of the environment, for a process that no other call uses.
    """
    return processes.call(_run_jobs, jobs, timeout, **env)


def _top_gaps(logprobs) -> list[float] | None:
    """Distance of the two best logits at each position, where logprobs were asked."""
    if not logprobs:
        return None
    best = (sorted((v.logprob for v in p.values()), reverse=True) for p in logprobs)
    return [values[0] - values[1] for values in best if len(values) > 1]


def _tree_metrics(llm: "LLM") -> dict[str, float | list[float]]:
    """Counters and [count, sum] of histograms, by name and label."""
    found = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:specinfer_")
        if name == metric.name:
            continue
        labels = {**metric.labels}
        assert labels.pop("engine") == "0" and labels.pop("model_name")
        counter = hasattr(metric, "value")
        value = metric.value if counter else [metric.count, metric.sum]
        found[" ".join([name, *labels.values()])] = value
    return found


def _params(params: dict) -> "SamplingParams":
    """Sampling parameters from JSON."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = dict(params)
    if bias := params.get("logit_bias"):
        params["logit_bias"] = {int(token): value for token, value in bias.items()}
    if grammar := params.get("structured_outputs"):
        params["structured_outputs"] = StructuredOutputsParams(**grammar)
    return SamplingParams(**params)


def _loras(folders: list[str | None]) -> "list[LoRARequest | None]":
    """The adapter of each prompt; the same folder is the same adapter."""
    from vllm.lora.request import LoRARequest

    numbers = {f: i for i, f in enumerate(dict.fromkeys(filter(None, folders)), 1)}
    return [f and LoRARequest(f, numbers[f], f) for f in folders]


def _logprobs(logprobs) -> list[list[tuple[int, float, int]]] | None:
    """(token, log-probability, rank) of what each position reports."""
    if not logprobs:
        return None
    return [
        [(token, v.logprob, v.rank) for token, v in (position or {}).items()]
        for position in logprobs
    ]


def _run_jobs(jobs: list[dict]) -> list[dict]:
    results = []
    for job in jobs:
        with (
            mutation(job.get("mutation")),
            _branches(job) as branches,
            _scores(job) as scores,
            _runner(job.get("plain_v2", False)),
            _scheduling(job.get("asynchronous", False)),
        ):
            result = _generate(job)
            results.append({**result, "branches": sum(branches), "scores": scores})
    # As JSON has them: keys are strings, tuples are lists.
    return json.loads(json.dumps(results))


@contextlib.contextmanager
def _runner(plain_v2: bool) -> Iterator[None]:
    """Model Runner V2 without speculation: V1 draws other random numbers."""
    speculative_config._switch_runner_off()
    if not plain_v2:
        yield
        return
    with mock.patch.dict(os.environ):
        cpu_v2.enable_in_frontend()
        yield
        cpu_v2.disable_in_frontend()


@contextlib.contextmanager
def _scheduling(asynchronous: bool) -> Iterator[None]:
    """Asynchronous scheduling, which vLLM switches off on a CPU."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(cls, vllm_config):
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asynchronous

    with mock.patch.object(
        CpuPlatform, "check_and_update_config", classmethod(checked)
    ):
        yield


@contextlib.contextmanager
def _branches(job: dict) -> Iterator[list[bool]]:
    """Fills a list: whether each accepted path left the chain of first children."""
    found: list[bool] = []
    if (job["llm"].get("speculative_config") or {}).get("method") != "specinfer":
        yield found
        return
    from vllm_specinfer.model_state import TreeModelState

    commit = TreeModelState.commit

    def counted(self, batch, accepted):
        for i, rows in accepted.items():
            if not rows:
                continue
            parents = self._trees.parents[batch.idx_mapping_np[i]]
            nodes = [row - 1 for row in rows]
            first = [parents.tolist().index(parents[node]) for node in nodes]
            found.append(nodes != first)
        return commit(self, batch, accepted)

    with mock.patch.object(TreeModelState, "commit", counted):
        yield found


@contextlib.contextmanager
def _scores(job: dict) -> Iterator[list[tuple[list[int], list[float]]]]:
    """Fills a list: of each verified tree the parents, and what all sources gave."""
    found: list[tuple[list[int], list[float]]] = []
    if not job.get("scores"):
        yield found
        return
    from vllm_specinfer.drafting.experience import Experience

    observe = Experience.observe

    def observed(self, slot, accepted, num_rows):
        if slot in self._given:  # not in vLLM's warm-up
            parents, given, _ = self._given[slot]
            is_node = (given > -math.inf).any(axis=0)
            sums = given[:, is_node].clip(min=-1e3).sum(axis=0)
            found.append((parents[is_node].tolist(), sums.tolist()))
        return observe(self, slot, accepted, num_rows)

    with mock.patch.object(Experience, "observe", observed):
        yield found


def _generate(job: dict) -> dict:
    from vllm import LLM

    processes.hasten_starts()
    options = {"worker_cls": V2_WORKER} if job.get("plain_v2") else {}
    options |= {"kv_cache_memory_bytes": KV_BYTES, **job["llm"]}
    llm = LLM(disable_log_stats=False, **options)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    for i, shape in enumerate(job.get("images", ())):
        if shape is not None:
            prompts[i]["multi_modal_data"] = {"image": _image(*shape, seed=i)}
    for given, salt in zip(prompts, job.get("salts", ()), strict=False):
        if salt is not None:
            given["cache_salt"] = salt
    params = [_params(p) for p in job["params"]]
    if len(params) == 1:
        params *= len(prompts)
    if job.get("batched", True):
        loras = _loras(job["loras"]) if "loras" in job else None
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
    else:
        outputs = [
            llm.generate(prompt, p, use_tqdm=False)[0]
            for prompt, p in zip(prompts, params, strict=True)
        ]
    metrics = {}
    for m in llm.get_metrics():
        found = (getattr(m, key, None) for key in ("value", "values", "count"))
        metrics[m.name] = next(v for v in found if v is not None)
    core = llm.llm_engine.engine_core.engine_core
    manager = core.scheduler.kv_cache_manager
    runner = core.model_executor.driver_worker.worker.model_runner
    sources = getattr(getattr(runner, "speculator", None), "sources", None)
    if sources:
        runner.speculator.learn()
    result = {
        "tokens": [[list(c.token_ids) for c in o.outputs] for o in outputs],
        "texts": [[c.text for c in o.outputs] for o in outputs],
        "gaps": [[_top_gaps(c.logprobs) for c in o.outputs] for o in outputs],
        "logprobs": [[_logprobs(c.logprobs) for c in o.outputs] for o in outputs],
        "first_token_seconds": [
            o.metrics.first_token_ts - o.metrics.scheduled_ts for o in outputs
        ],
        "prompt_logprobs": [_logprobs(o.prompt_logprobs) for o in outputs],
        "drafts": metrics.get("vllm:spec_decode_num_drafts", 0),
        "drafted": metrics.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
        "drafted_by_request": [
            getattr(c.spec_decode_metrics, "num_draft_tokens", None)
            for o in outputs
            for c in o.outputs
        ],
        "accepted_per_pos": metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos"),
        "decode_steps": metrics["vllm:inter_token_latency_seconds"],
        "metrics": _tree_metrics(llm),
        "learned": sources and sources.experience.learned(),
        "ssm_rows": sources and sum(source.ssm.num_rows for source in sources.ssms),
        "preemptions": metrics.get("vllm:num_preemptions", 0),
        "cache_hits": metrics.get("vllm:prefix_cache_hits", 0),
        "steps_in_flight": core.batch_queue_size,
        "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        "blocks": manager.block_pool.num_gpu_blocks,
        "free_blocks": manager.block_pool.get_num_free_blocks(),
    }
    if job.get("profiles"):
        result["layers"] = _layers_with_graphs(runner)
    del llm
    gc.collect()
    return result


def _image(height: int, width: int, seed: int) -> Image.Image:
    """Of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def _layers_with_graphs(runner: Any) -> list[str]:
    """Layers of the KV cache that vLLM makes on CUDA to find out what graphs take."""
    from vllm.v1.worker.gpu import cudagraph_utils

    runner.compilation_config.max_cudagraph_capture_size = 1
    cudagraph_utils._teardown_profiling_state(runner)
    cudagraph_utils._init_minimal_kv_cache_for_profiling(runner)
    return [n for of_kv in runner.attn_groups for g in of_kv for n in g.layer_names]
