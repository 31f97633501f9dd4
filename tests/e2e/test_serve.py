"""vLLM's server with specinfer under load: aborts, preemption, nothing leaked."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import engine
from tests.e2e.server import Metrics, Server, serve
from vllm_specinfer import assets
from vllm_specinfer.scheduling.step_stats import PHASES, REASONS

EXAMPLES = Path(__file__).parents[2] / "examples"
POOL = EXAMPLES / "pools" / "smollm2-135m"
MAX_TOKENS = 64
ABORTED = range(3, 32, 5)
ARGS = {
    "dtype": "float32",
    "max_model_len": 384,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "block_size": 32,
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """32 chats of uneven length; every other one starts like its neighbour."""
    texts = [text[:200] for text in assets.mtbench()[:32]]
    shared = texts[0] + texts[1]
    texts[1::2] = [shared + text for text in texts[1::2]]
    return assets.chat_token_ids(assets.smollm2(), texts)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with few KV blocks and small prefill chunks."""
    args = {
        **ARGS,
        "num_gpu_blocks_override": 14,
        "max_num_batched_tokens": 256,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
    }
    specinfer = {"method": "specinfer", "model": str(POOL), "scheduler": "static"}
    log = tmp_path_factory.mktemp("serve") / "log"
    with serve(
        str(assets.smollm2()), log, speculative=specinfer, engine_args=args
    ) as found:
        yield found


async def stream(client, prompt: list[int], abort_after: int | None) -> list[int]:
    """Token ids of one streamed completion, closed early if asked to."""
    tokens: list[int] = []
    async with await client.completions.create(
        model=str(assets.smollm2()),
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True},
    ) as response:
        async for chunk in response:
            tokens += chunk.choices[0].model_extra["token_ids"] or []
            if abort_after is not None and len(tokens) >= abort_after:
                break
    return tokens


async def run_all(address: str, prompts: list[list[int]]) -> list[list[int]]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        return await asyncio.gather(
            *(
                stream(client, prompt, 1 + i if i in ABORTED else None)
                for i, prompt in enumerate(prompts)
            )
        )


def check_metrics(found: Metrics, seconds: float) -> None:
    """The trees' metrics agree with vLLM's."""
    found.check_trees()
    sources = found.by("source", "vllm:specinfer_accepted_tokens_total")
    assert set(sources) == {"suffix", "ssm0"} and min(sources.values()) > 0
    plain = found.by("reason", "vllm:specinfer_plain_request_steps_total")
    assert set(plain) == set(REASONS) and plain["prefill"] >= 32 - len(ABORTED)
    assert not plain["budget"] and not plain["measuring"]
    phases = found.by("phase", "vllm:specinfer_phase_seconds_sum")
    assert set(phases) == set(PHASES) and min(phases.values()) > 0
    assert sum(phases.values()) < seconds
    (theirs,) = (
        s.labels for s in found.samples if s.name == "vllm:kv_cache_usage_perc"
    )
    for sample in found.samples:
        if sample.name.startswith("vllm:specinfer_"):
            assert theirs.items() <= sample.labels.items()


def check_dashboard(found: Metrics) -> None:
    """Every expression names metrics, labels and values that the server exports."""
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            metrics = re.findall(r"(vllm:\w+)\{(.*?)\}", expression)
            assert metrics and len(metrics) == expression.count("vllm:"), expression
            labels = set()
            for name, selector in metrics:
                of_metric = {
                    k for s in found.samples if s.name == name for k in s.labels
                }
                assert set(re.findall(r"(\w+)[!=]", selector)) <= of_metric, name
                labels |= of_metric
            assert set(re.findall(r"by \((\w+)\)", expression)) <= labels, expression


def test_32_streams_with_aborts_and_preemption_equal_plain_decoding(server, prompts):
    started = time.monotonic()
    streamed = asyncio.run(run_all(server.address, prompts))
    seconds = time.monotonic() - started
    (plain,) = engine.run(
        [
            {
                "llm": {
                    "model": str(assets.smollm2()),
                    "kv_cache_memory_bytes": 1 << 30,
                    **ARGS,
                },
                "prompts": prompts,
                "params": [{"temperature": 0, "max_tokens": MAX_TOKENS}],
            }
        ]
    )
    for i, (got, (want,)) in enumerate(zip(streamed, plain["tokens"], strict=True)):
        if i in ABORTED:
            assert got == want[: len(got)], i
        else:
            assert got == want, i
    deadline = time.time() + 20
    while not server.metrics().idle and time.time() < deadline:
        time.sleep(0.5)
    after = server.metrics()
    assert after["vllm:num_preemptions_total"] > 0
    assert after.idle
    check_metrics(after, seconds)
    check_dashboard(after)
    (line,) = (
        x for x in server.log.read_text().splitlines() if "specinfer: sources" in x
    )
    assert f"ssm0 ({POOL / 'ssm0'})" in line and "the scheduler is 'static'" in line
