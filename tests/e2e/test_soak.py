"""Mixed traffic on a real server, and what happens when something of it breaks."""

import asyncio
import time

import httpx
import pytest

from tests.e2e import soak

SECONDS = 30


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return soak.make_models(tmp_path_factory.mktemp("models"))


def test_mixed_traffic_gets_the_texts_of_plain_decoding(models, tmp_path):
    requests = soak.the_requests(60, seed=1)
    expected = soak.references(models, requests)
    with soak.start(models, tmp_path, "static", forks=True) as server:
        traffic = soak.Soak(server, models, requests, expected, seed=1)
        asyncio.run(traffic.run(SECONDS, interruptions=3))
        a_disconnect_gives_the_blocks_back(server)
    assert traffic.interruptions > 2


def a_long_request(**more) -> dict:
    return {
        **{"model": "target", "prompt": [1] * 60, "max_tokens": 190},
        **{"temperature": 0, "ignore_eos": True, **more},
    }


def a_disconnect_gives_the_blocks_back(server) -> None:
    """Long before the request would have ended by itself.

    The engine's own count of drafts shows it: nobody reads tokens of a request that
    somebody left.
    """

    def wait_until_idle() -> float:
        deadline = time.monotonic() + 10
        while not server.metrics().idle and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.metrics().idle
        return server.metrics()["vllm:spec_decode_num_drafts_total"]

    url = f"{server.address}/v1/completions"
    # Of a text that nobody foresees, the request has many steps.
    request = a_long_request(temperature=1.0, seed=1)
    before = wait_until_idle()
    httpx.post(url, json=request, timeout=30).raise_for_status()
    whole = wait_until_idle()
    with httpx.stream("POST", url, json={**request, "stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(5):
            next(lines)
        assert not server.metrics().idle
    assert 0 < wait_until_idle() - whole < 0.9 * (whole - before)


@pytest.mark.parametrize("fault", ["killed worker", "broken SSM"])
def test_a_fault_ends_all_requests_and_the_server(models, tmp_path, fault):
    with soak.start(models, tmp_path, "static", forks=True) as server:
        statuses = asyncio.run(during_requests(server, fault))
        # vLLM's own answer: an error, or a connection that it closes.
        assert len(statuses) == 8 and all(s is None or s >= 500 for s in statuses)
        server.wait_until_gone()
    found = server.log.read_text()
    assert "EngineDeadError" in found or "died" in found
    if fault == "broken SSM":
        assert "RuntimeError: the SSM is broken" in found


async def during_requests(server, fault: str) -> list[int | None]:
    """The statuses of eight requests when the fault comes; None for no answer.

    Of texts that nobody foresees: else they may have ended by then.
    """

    async def ask(http, seed: int) -> int | None:
        request = a_long_request(temperature=1.0, seed=seed)
        try:
            return (await http.post("/v1/completions", json=request)).status_code
        except httpx.TransportError as error:
            assert not isinstance(error, httpx.TimeoutException), "a request hangs"
            return None

    async with httpx.AsyncClient(base_url=server.address, timeout=30) as http:
        asked = [asyncio.create_task(ask(http, seed)) for seed in range(8)]
        while not server.metrics()["vllm:num_requests_running"]:
            await asyncio.sleep(0.01)
        if fault == "broken SSM":
            await http.post("/collective_rpc", json={"method": "break_ssm"})
        else:
            (core,) = server.process.children()
            (worker,) = core.children()
            worker.kill()
        return await asyncio.gather(*asked)
