"""A step's counts reach Prometheus, from another process and beside vLLM's loggers."""

import logging
from collections import Counter

import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_specinfer.metrics import TreeStatLogger
from vllm_specinfer.scheduling.step_stats import (
    BUDGET,
    DRAFT,
    PREFILL,
    RETURNED_BLOCKS,
    SHORT_STEPS,
    StepStats,
)


def received(plain, accepted=()) -> SchedulerStats:
    """What the front end gets of a step; `accepted` by tree of 8 nodes."""
    trees = SpecDecodingStats.new(8) if accepted else None
    for depth in accepted:
        trees.observe_draft(8, depth)
    total = Counter(ssm0=sum(accepted))
    step = StepStats(
        drafted=Counter(ssm0=9),
        accepted=total,
        plain=Counter(plain),
        microseconds=Counter({DRAFT: 250_000}),
        blocks=Counter({SHORT_STEPS: 1, RETURNED_BLOCKS: 2}),
    )
    stats = SchedulerStats(spec_decoding_stats=trees)
    step.put_into(stats.num_kv_fetch_reqs_by_stage)
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    return MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats


@pytest.fixture
def make_config(make_llama, v2_undone):
    from vllm import EngineArgs

    def make(speculative_config):
        return EngineArgs(
            model=make_llama("target"),
            served_model_name="name",
            skip_tokenizer_init=True,
            speculative_config=speculative_config,
        ).create_engine_config()

    return make


def value(name, engine, **labels):
    labels = {"model_name": "name", "engine": engine, **labels}
    return REGISTRY.get_sample_value(f"vllm:specinfer_{name}", labels)


def test_steps_of_two_engines_are_counted(make_config, make_llama, monkeypatch):
    config = make_config({"method": "specinfer", "ssms": [make_llama("ssm"), "suffix"]})
    # vLLM's own logger would report the counts as those of a KV connector.
    monkeypatch.setattr(loggers.logger, "level", logging.INFO)
    manager = loggers.StatLoggerManager(config, [0, 1], aggregate_engine_logging=True)
    assert any(isinstance(x, loggers.LoggingStatLogger) for x in manager.stat_loggers)
    manager.record(received({PREFILL: 2, BUDGET: 1}, accepted=[3, 0]), None, None, 1)
    manager.record(received({BUDGET: 1}), None, None, 1)
    last = received({PREFILL: 1})
    manager.record(last, None, None, 1)
    assert not last.num_kv_fetch_reqs_by_stage
    manager.record(None, None, None, 1)
    manager.record(SchedulerStats(), None, None, 1)
    found = {
        "drafted_nodes_total": value("drafted_nodes_total", "1", source="ssm0"),
        "accepted_tokens_total": value("accepted_tokens_total", "1", source="ssm0"),
        "suffix": value("accepted_tokens_total", "1", source="suffix"),
        "budget": value("plain_request_steps_total", "1", reason=BUDGET),
        "prefill": value("plain_request_steps_total", "1", reason=PREFILL),
        "draft": value("phase_seconds_sum", "1", phase=DRAFT),
        # Steps without a generating request have no place among the sizes.
        "steps": value("step_nodes_count", "1"),
        "nodes": value("step_nodes_sum", "1"),
        "trees": value("accepted_depth_count", "1"),
        "depths": value("accepted_depth_sum", "1"),
        "of depth 0": value("accepted_depth_bucket", "1", le="0.0"),
        "short": value("short_steps_total", "1"),
        "returned": value("returned_blocks_total", "1"),
        "other engine": value("step_nodes_count", "0"),
    }
    assert found == {
        "drafted_nodes_total": 27,
        "accepted_tokens_total": 3,
        "suffix": 0,
        "budget": 2,
        "prefill": 3,
        "draft": 0.75,
        "steps": 2,
        "nodes": 16,
        "trees": 2,
        "depths": 3,
        "of depth 0": 1,
        "short": 3,
        "returned": 6,
        "other engine": 0,
    }
    # The next engine of the process registers the names anew.
    manager = loggers.StatLoggerManager(config)
    assert (
        value("step_nodes_count", "0") == 0 and value("step_nodes_count", "1") is None
    )


def test_other_methods_have_no_metrics_of_ours(make_config, make_llama):
    make_config({"method": "specinfer", "model": make_llama("ssm")})
    config = make_config({"method": "ngram", "num_speculative_tokens": 3})
    manager = loggers.StatLoggerManager(config)
    assert not any(isinstance(x, TreeStatLogger) for x in manager.stat_loggers)
    assert value("step_nodes_count", "0") is None
