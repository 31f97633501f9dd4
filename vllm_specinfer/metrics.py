"""Prometheus metrics of the trees, beside vLLM's own of speculative decoding.

Registered in the front end, where vLLM has its metrics, with the same labels.
"""

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_specinfer.scheduling.step_stats import (
    PHASES,
    PREFILL,
    REASONS,
    RETURNED_BLOCKS,
    SHORT_STEPS,
    StepStats,
)

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096)
SECONDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class TreeStatLogger(AggregateStatLoggerBase):
    """Takes each step's `StepStats` out of vLLM's statistics and counts them.

    It should come before vLLM's loggers, which would report transfers of K/V, and be
    made after them: a Prometheus logger of vLLM first drops all metrics whose names
    begin as these do.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        """Register the metrics.

        Args:
            vllm_config: The engine's config; its speculative config is ours.
            engine_indexes: The engines that report to this process.
        """
        spec = vllm_config.speculative_config
        max_nodes = spec.num_speculative_tokens
        self._model_name = vllm_config.model_config.served_model_name
        self._engines = engine_indexes
        by_source = {"source": spec.source_names}
        self._drafted = self._by_label(
            Counter,
            "drafted_nodes",
            "Nodes of the drafted trees; one of several sources counts for the first.",
            by_source,
        )
        self._accepted = self._by_label(
            Counter,
            "accepted_tokens",
            "Accepted nodes; one of several sources counts for the first.",
            by_source,
        )
        self._plain = self._by_label(
            Counter,
            "plain_request_steps",
            "Requests that ran in a step without any node.",
            {"reason": REASONS},
        )
        blocks = {
            SHORT_STEPS: "Steps that lacked K/V blocks, so that trees got no more.",
            RETURNED_BLOCKS: "K/V blocks that trees gave back in such steps.",
        }
        self._blocks = {
            name: self._by_label(Counter, name, text) for name, text in blocks.items()
        }
        self._nodes = self._by_label(
            Histogram,
            "step_nodes",
            "Nodes that a step with generating requests verified for all of them.",
            buckets=up_to(max_nodes * vllm_config.scheduler_config.max_num_seqs),
        )
        self._depths = self._by_label(
            Histogram,
            "accepted_depth",
            "Accepted nodes of one tree, which is how deep its accepted path went.",
            buckets=up_to(max_nodes),
        )
        self._seconds = self._by_label(
            Histogram,
            "phase_seconds",
            "Time of a step's phase on the worker's host.",
            {"phase": PHASES},
            buckets=SECONDS,
        )

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Count one step (vllm/v1/metrics/loggers.py)."""
        if scheduler_stats is None:
            return
        step = StepStats.taken_from(scheduler_stats.num_kv_fetch_reqs_by_stage)
        for counters, counts in (
            (self._drafted, step.drafted),
            (self._accepted, step.accepted),
            (self._plain, step.plain),
        ):
            for label, count in counts.items():
                counters[engine_idx, label].inc(count)
        for name, count in step.blocks.items():
            self._blocks[name][engine_idx,].inc(count)
        for phase, microseconds in step.microseconds.items():
            self._seconds[engine_idx, phase].observe(microseconds / 1e6)
        trees = scheduler_stats.spec_decoding_stats
        if trees is not None:
            self._nodes[engine_idx,].observe(trees.num_draft_tokens)
            for depth, count in enumerate(depth_counts(trees)):
                for _ in range(count):
                    self._depths[engine_idx,].observe(depth)
        elif step.plain.keys() - {PREFILL}:
            self._nodes[engine_idx,].observe(0)

    def log_engine_initialized(self) -> None:
        """Nothing to log."""

    def _by_label(
        self,
        kind: type[Counter | Histogram],
        name: str,
        documentation: str,
        label: dict[str, tuple[str, ...]] | None = None,
        **options: Any,
    ) -> dict[tuple, Any]:
        """By engine and the label's value, if there is one: all from the start."""
        labels = ["model_name", "engine", *(label or {})]
        metric = kind(f"vllm:specinfer_{name}", documentation, labels, **options)
        values = [(v,) for of_label in (label or {}).values() for v in of_label]
        return {
            (engine, *value): metric.labels(self._model_name, str(engine), *value)
            for engine in self._engines
            for value in values or [()]
        }


def up_to(most: int) -> tuple[int, ...]:
    """Bucket limits for sizes up to this one."""
    return tuple(size for size in SIZES if size < most) + (most,)


def depth_counts(trees: SpecDecodingStats) -> list[int]:
    """How many trees' accepted paths ended at depth 0, 1, ...

    vLLM counts the accepted drafts by their place in a request's output, which is the
    depth of the node, so a path of depth 2 counts at places 0 and 1.
    """
    reached = [trees.num_drafts, *trees.num_accepted_tokens_per_pos, 0]
    return [here - below for here, below in zip(reached[:-1], reached[1:], strict=True)]
