"""Runs engines in a process of their own, which later calls use again.

A job is {"llm": {...}, "prompts": [[ids]], "params": [{...}], "batched": bool,
"mutation": name or null, "plain_v2": bool, "asynchronous": bool, "loras": [folder or
null]}; its result has the output token ids, texts and logprobs per prompt and the
speculation counts.
"""

import contextlib
import gc
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil

from vllm_specinfer.hooks import cpu_v2, speculative_config

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # The blocks of all requests are checked after every step.
    "VLLM_SPECINFER_DEBUG": "1",
}


# Enough for tiny models; an engine fills all of it with zeros.
KV_BYTES = 128 << 20
V2_WORKER = "vllm_specinfer.hooks.cpu_v2_worker.CPUV2Worker"
# Importing vLLM takes longer than most jobs; a new process now and then frees memory.
CALLS_PER_PROCESS = 12
_shared: list[ProcessPoolExecutor] = []


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
    return call(_run_jobs, jobs, timeout, **env)


def call(function: Callable, argument: Any, timeout: float = 1200, **env: str) -> Any:
    """`function(argument)` in the process, as `run`."""
    if env:
        processes = _process(env)
    else:
        if not _shared:
            _shared.append(_process({}))
        processes = _shared[0]
    try:
        return processes.submit(function, argument).result(timeout)
    except BaseException:
        # What hangs or is half done must not reach the next call.
        _shared.clear()
        kill_children(psutil.Process())
        raise


def kill_children(process: psutil.Process) -> None:
    """Kill what a process has started, and what that has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _process(env: dict[str, str]) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        1,
        multiprocessing.get_context("spawn"),
        _set_environment,
        ({**ENV, **env},),
        max_tasks_per_child=CALLS_PER_PROCESS,
    )


def _set_environment(env: dict[str, str]) -> None:
    os.environ.update(env)


def _mutation(name: str | None) -> contextlib.AbstractContextManager:
    """One wrong rule or rare event put into the engine."""
    if name is None:
        return contextlib.nullcontext()
    import numpy as np
    from vllm.logger import init_logger
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_specinfer import model_state, speculator
    from vllm_specinfer.drafting import children
    from vllm_specinfer.drafting.eagle import EagleHead
    from vllm_specinfer.drafting.neural import NeuralSource
    from vllm_specinfer.drafting.sources import SourceSet
    from vllm_specinfer.kernels.cpu import sampling
    from vllm_specinfer.scheduling import budget_memory
    from vllm_specinfer.scheduling.budget import Budget
    from vllm_specinfer.scheduling.load_budget import LoadBudget
    from vllm_specinfer.scheduling.scheduler import SpecInferScheduler
    from vllm_specinfer.tree import table
    from vllm_specinfer.tree.candidates import Candidates
    from vllm_specinfer.tree.proposals import NO_DRAW, Draws
    from vllm_specinfer.tree.table import StepPlan
    from vllm_specinfer.tree.token_tree import chain_bits
    from vllm_specinfer.verify import sampler, stochastic

    init_logger(__name__).warning("mutation: %s", name)

    def causal_mask(plan: StepPlan, num_rows: int) -> np.ndarray:
        bits = np.zeros((num_rows, plan.table.bits.shape[2]), np.int64)
        for i in plan.tree_requests():
            start, rows = plan.query_start_loc[i], plan.num_rows[i]
            bits[start : start + rows] = chain_bits(rows, bits.shape[1])
        return bits

    def parents_token_as_bonus(self, batch, emitted, levels):
        emitted = [[*tokens[:-1], tokens[-2:][0]] for tokens in emitted]
        return output(self, batch, emitted, levels)

    def changed_draws(change):
        """Children whose draws `change` has put something else into."""

        def wrong(self, logprobs, tokens, num_children, rows):
            found = choose(self, logprobs, tokens, num_children, rows)
            if found.draws is not None:
                for f in range(len(found.tokens)):
                    change(found, f)
            return found

        return lambda: mock.patch.object(children.ChildChooser, "choose", wrong)

    def drop_duplicates(found, f):
        repeated = np.isneginf(found.scores[f])
        found.draws.places[f][repeated] = NO_DRAW

    def take_the_likeliest(found, f):
        k = found.draws.places.shape[1]
        order = np.argsort(-found.draws.q[f, 0], kind="stable")[:k]
        found.draws.places[f] = order
        found.tokens[f] = found.draws.tokens[f][order]

    def drop_unlikely(found, f):
        places = found.draws.places[f]
        places[found.draws.q[f, 0, places] < 0.2] = NO_DRAW
        found.scores[f][places == NO_DRAW] = -np.inf
        # Tests stop at the first gap.
        kept = [p for p in places if p != NO_DRAW]
        places[:] = kept + [NO_DRAW] * (len(places) - len(kept))

    def keep_the_first_q(found, f):
        found.draws.q[f] = found.draws.q[f, 0]

    def drop_what_another_source_drew(draws):
        seen, kept = set(), []
        for d in draws:
            drawn = d.tokens[0, d.places[0]].tolist()
            columns = [j for j, token in enumerate(drawn) if token not in seen]
            kept.append(Draws(d.places[:, columns], d.tokens, d.q[:, columns]))
            seen.update(drawn)
        return joined(kept)

    def ssms_sit_out_the_first_request():
        started = []

        def count(self, slot, request):
            started.append(slot)
            start(self, slot, request)

        return mock.patch.multiple(
            SourceSet,
            start=count,
            _asks_ssms=lambda self, *args: len(started) > 1 and asks(self, *args),
        )

    def no_stock_attention():
        def refuse(*args, **kwargs):
            raise AssertionError("vLLM's attention kernel was called")

        return mock.patch.object(cpu_attn.ops, "cpu_attention_with_kv_cache", refuse)

    def record_drafts():
        found = []

        def recorded(self, step, least):
            proposal = begin(self, step, least)()
            candidates = proposal.candidates
            for r, i in enumerate(step.growing):
                known = step.all_token_ids[step.slots[i], : step.num_tokens[i]]
                columns = candidates.tokens, candidates.parents, candidates.scores
                found.append([known.tolist(), *(c[r].tolist() for c in columns)])
            Path(os.environ["RECORDED_DRAFTS"]).write_text(json.dumps(found))
            return lambda: proposal

        return mock.patch.object(NeuralSource, "begin", recorded)

    def trees_of_any_size():
        """The scheduler gets all of a tree, a few nodes or none."""
        rng = random.Random(0)

        def cut(self, drafts):
            for i, tree in enumerate(drafts.draft_token_ids):
                size = rng.choice([0, len(tree) // 4, len(tree)])
                drafts.draft_token_ids[i] = tree[:size]
                drafts.parents[i] = drafts.parents[i][:size]
            update(self, drafts)

        return mock.patch.object(SpecInferScheduler, "update_draft_token_ids", cut)

    @contextlib.contextmanager
    def rows_without_their_path():
        nobody = lambda _, slots: np.zeros(len(slots), bool)  # noqa: E731
        with (
            mock.patch.object(sampler, "looks_back", nobody),
            mock.patch.object(sampler.TreeSampler, "_only_draws", lambda *_: False),
        ):
            yield

    def drafts_take_a_second():
        def slow(self):
            time.sleep(1)
            return draft(self)

        return mock.patch.object(speculator.TreeSpeculator, "draft", slow)

    @contextlib.contextmanager
    def draft_and_save_every_step():
        always = {n: getattr(Budget, n) for n in ("drafts", "worth", "least_score")}
        with (
            mock.patch.object(budget_memory, "SAVE_STEPS", 1),
            mock.patch.multiple(LoadBudget, **always),
        ):
            yield

    begin = NeuralSource.begin
    draft = speculator.TreeSpeculator.draft
    update = SpecInferScheduler.update_draft_token_ids
    start, asks = SourceSet.start, SourceSet._asks_ssms
    joined = table.joined
    choose = children.ChildChooser.choose
    output = sampler.TreeSampler._output
    draw = sampling.noised_argmax
    return {
        "mask": lambda: mock.patch.object(StepPlan, "ancestor_bits", causal_mask),
        "position": lambda: mock.patch.object(
            StepPlan, "fill_positions", lambda *args: None
        ),
        "commit": lambda: mock.patch.object(
            model_state.TreeModelState, "commit", lambda *args: None
        ),
        "look_back": rows_without_their_path,
        "noise": lambda: mock.patch.object(
            sampling,
            "noised_argmax",
            lambda logits, temperatures, seeds, positions: draw(
                logits, temperatures, seeds, 0 * positions
            ),
        ),
        "chain_grammar": lambda: mock.patch.object(
            SpecInferScheduler,
            "get_grammar_bitmask",
            Scheduler.get_grammar_bitmask,
        ),
        "bonus": lambda: mock.patch.object(
            sampler.TreeSampler, "_output", parents_token_as_bonus
        ),
        "trees_of_any_size": trees_of_any_size,
        "slots_are_kept": lambda: mock.patch.object(
            SpecInferScheduler, "schedule", Scheduler.schedule
        ),
        "duplicates_dropped": changed_draws(drop_duplicates),
        "likeliest_children": changed_draws(take_the_likeliest),
        "only_kept_children": changed_draws(drop_unlikely),
        "hopeless_trees_dropped": lambda: mock.patch.object(
            Candidates, "raised", lambda self, *args: self
        ),
        "q_not_updated": changed_draws(keep_the_first_q),
        "duplicates_across_sources_dropped": lambda: mock.patch.object(
            table, "joined", drop_what_another_source_drew
        ),
        "ssms_sit_out_the_first_request": ssms_sit_out_the_first_request,
        "no_stock_attention": no_stock_attention,
        "record_drafts": record_drafts,
        "drafts_take_a_second": drafts_take_a_second,
        "draft_and_save_every_step": draft_and_save_every_step,
        "states_lost": lambda: mock.patch.object(
            EagleHead, "_keep", lambda *args: None
        ),
        "shared_uniforms": lambda: mock.patch.object(
            children, "DRAFT_NOISE_SALT", stochastic.TEST_SALT
        ),
    }[name]()


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
            _mutation(job.get("mutation")),
            _branches(job) as branches,
            _scores() as scores,
            _runner(job.get("plain_v2", False)),
            _scheduling(job.get("asynchronous", False)),
            _frozen_modules(),
        ):
            result = _generate(job)
            results.append({**result, "branches": sum(branches), "scores": scores})
    # As JSON has them: keys are strings, tuples are lists.
    return json.loads(json.dumps(results))


@contextlib.contextmanager
def _frozen_modules() -> Iterator[None]:
    """vLLM collects a dozen times per engine, and thaws what is frozen when one ends:
    it must not read all modules again."""
    import vllm.entrypoints.llm  # noqa: F401

    gc.freeze()
    nothing = {"freeze": lambda: None, "unfreeze": lambda: None}
    with mock.patch.multiple(gc, **nothing):
        yield


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
def _scores() -> Iterator[list[tuple[list[int], list[float]]]]:
    """Fills a list: of each verified tree the parents, and what all sources gave."""
    from vllm_specinfer.drafting.sources import SourceSet

    observe, found = SourceSet.observe, []

    def observed(self, slot, accepted):
        if slot in self._given:  # not in vLLM's warm-up
            parents, given, _ = self._given[slot]
            is_node = (given > -math.inf).any(axis=0)
            sums = given[:, is_node].clip(min=-1e3).sum(axis=0)
            found.append((parents[is_node].tolist(), sums.tolist()))
        return observe(self, slot, accepted)

    with mock.patch.object(SourceSet, "observe", observed):
        yield found


def _generate(job: dict) -> dict:
    from vllm import LLM
    from vllm.model_executor.models import registry

    # vLLM looks at each architecture in a process of its own.
    registry._run_in_subprocess = lambda inspect: inspect()
    options = {"worker_cls": V2_WORKER} if job.get("plain_v2") else {}
    options |= {"kv_cache_memory_bytes": KV_BYTES, **job["llm"]}
    llm = LLM(disable_log_stats=False, **options)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
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
        "learned": sources and sources.learned(),
        "preemptions": metrics.get("vllm:num_preemptions", 0),
        "steps_in_flight": core.batch_queue_size,
        "blocks": manager.block_pool.num_gpu_blocks,
        "free_blocks": manager.block_pool.get_num_free_blocks(),
    }
    if job.get("profiles"):
        result["layers"] = _layers_with_graphs(runner)
    del llm
    gc.collect()
    return result


def _layers_with_graphs(runner: Any) -> list[str]:
    """Layers of the KV cache that vLLM makes on CUDA to find out what graphs take."""
    from vllm.v1.worker.gpu import cudagraph_utils

    runner.compilation_config.max_cudagraph_capture_size = 1
    cudagraph_utils._teardown_profiling_state(runner)
    cudagraph_utils._init_minimal_kv_cache_for_profiling(runner)
    return [n for of_kv in runner.attn_groups for g in of_kv for n in g.layer_names]
