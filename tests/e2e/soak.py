"""Mixed traffic on a real server for minutes: every text is that of plain decoding.

    python -m tests.e2e.soak --minutes 10

Clients ask for what `the_requests` lists, whole or streamed, leave in the middle, reset
the prefix cache below running requests and share few KV blocks. Every few seconds the
traffic stops: then no block, row or request may be left, and the target's weights
change. References come from plain decoding on Model Runner V2 in another process.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from tests.e2e import engine
from tests.e2e.memory import LEAST_ROUNDS, NO_CACHE, MemoryWatch
from tests.e2e.models import (
    VOCAB,
    add_tokenizer,
    lora_adapter,
    noisy_copy,
    tiny_llama,
)
from tests.e2e.server import Server, serve

NUM_CLIENTS, ROUND_SECONDS = 10, 8
# What no request takes, however long its queue.
TIMEOUT_SECONDS = 120
TOLERANCE = 2e-3
LLM = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 6,
    "enforce_eager": True,
    "block_size": 32,
    "enable_lora": True,
    # One more than there are: on a CPU vLLM's requests without an adapter use the
    # last place, which must stay empty.
    "max_loras": 3,
    "max_lora_rank": 8,
}
# A third of what the running requests could use; prompts come in pieces.
SERVER = {
    "num_gpu_blocks_override": 18,
    "max_num_batched_tokens": 128,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "worker_extension_cls": "tests.e2e.soak.WorkerState",
}


class WorkerState:
    """What the server's worker can be asked by `collective_rpc`."""

    def free_rows(self) -> str:
        """Requests that it has room for."""
        return str(len(self.model_runner.req_states.free_indices))

    def break_ssm(self) -> None:
        """The next pass of the SSM raises."""

        def forward(*args: object, **kwargs: object) -> None:
            raise RuntimeError("the SSM is broken")

        self.model_runner.speculator.sources.ssms[0].ssm.model.forward = forward


class Models(NamedTuple):
    """Folders of two sets of the target's weights, an SSM and adapters."""

    targets: tuple[str, str]
    ssm: str
    loras: tuple[str, ...]


def make_models(folder: Path) -> Models:
    """Random models; the SSM knows the first target better than the second."""
    first = tiny_llama(folder / "target", seed=0, scale=3, eos_token_id=5)
    second = noisy_copy(first, folder / "second", noise=0.1, seed=7)
    ssm = noisy_copy(first, folder / "ssm", noise=0.05)
    add_tokenizer(first, second, ssm)
    loras = tuple(lora_adapter(folder / f"lora{i}", seed=i) for i in range(2))
    return Models((first, second), ssm, loras)


class Request(NamedTuple):
    """A prompt, sampling parameters, and the number of an adapter or None."""

    prompt: list[int]
    params: dict
    lora: int | None


def the_requests(count: int, seed: int) -> list[Request]:
    """Prompts that often begin alike, with parameters of every kind."""
    rng = random.Random(seed)
    begins = [rng.choices(range(1, VOCAB), k=70) for _ in range(3)]

    def character() -> str:
        return chr(33 + rng.randrange(VOCAB - 1))

    options = {
        "top_k": lambda: rng.randint(1, 40),
        "top_p": lambda: rng.uniform(0.3, 1),
        "min_p": lambda: rng.uniform(0, 0.3),
        "repetition_penalty": lambda: rng.uniform(0.9, 1.5),
        "frequency_penalty": lambda: rng.uniform(-0.5, 1.5),
        "logit_bias": lambda: {rng.randrange(VOCAB): rng.uniform(-5, 5)},
        "bad_words": lambda: [character() + character()],
        "stop": lambda: [character(), character() + character()],
        "stop_token_ids": lambda: rng.sample(range(VOCAB), 2),
        "ignore_eos": lambda: True,
        "logprobs": lambda: rng.randint(0, 3),
        "n": lambda: rng.randint(2, 3),
    }
    requests = []
    for _ in range(count):
        prompt = rng.choices(range(1, VOCAB), k=rng.randint(1, 60))
        if rng.random() < 0.5:
            prompt = rng.choice(begins) + prompt
        params = {
            "max_tokens": rng.randint(1, 90),
            "temperature": rng.choice([0, 0, 0.3, 0.7, 1.0]),
            "seed": rng.randrange(1 << 62),
        }
        for name in rng.sample(sorted(options), rng.randint(0, 3)):
            params[name] = options[name]()
        if params["temperature"] == 0:
            params.pop("n", None)  # vLLM refuses it
        requests.append(Request(prompt, params, rng.choice([None, None, 0, 1])))
    return requests


class Answer(NamedTuple):
    """One text that a request gets."""

    text: str
    tokens: list[int]
    logprobs: list[float]

    def begins(self, other: "Answer") -> bool:
        """Whether the other one may go on from here."""
        n = len(self.tokens)
        return (
            other.text.startswith(self.text)
            and other.tokens[:n] == self.tokens
            and all(
                abs(a - b) <= TOLERANCE
                for a, b in zip(self.logprobs, other.logprobs, strict=False)
            )
        )


def references(models: Models, requests: list[Request]) -> list[list[list[Answer]]]:
    """What plain decoding answers, by target, request and number of the text."""
    jobs = [
        {
            "llm": {"model": target, **LLM},
            "prompts": [r.prompt for r in requests],
            "params": [r.params for r in requests],
            "loras": [
                r.lora if r.lora is None else models.loras[r.lora] for r in requests
            ],
            "plain_v2": True,
        }
        for target in models.targets
    ]
    found = []
    for result in engine.run(jobs):
        of_requests = zip(
            result["texts"], result["tokens"], result["logprobs"], strict=True
        )
        found.append(
            [
                [
                    Answer(text, tokens, [p[0][1] for p in logprobs or []])
                    for text, tokens, logprobs in zip(*columns, strict=True)
                ]
                for columns in of_requests
            ]
        )
    return found


def start(models: Models, folder: Path, scheduler: str, forks: bool = False):
    """A server of the first target; use it with `with`."""
    loras = (f"lora{i}={path}" for i, path in enumerate(models.loras))
    specinfer = {
        "method": "specinfer",
        "ssms": [models.ssm, {"model": "suffix", "max_tokens": 4096}],
        "num_speculative_tokens": 8,
        "scheduler": scheduler,
    }
    return serve(
        models.targets[0],
        folder / f"{scheduler}.log",
        *("--lora-modules", *loras, "--served-model-name", "target"),
        speculative=specinfer,
        engine_args=LLM | SERVER,
        env={"VLLM_SERVER_DEV_MODE": "1", **NO_CACHE},
        forks=forks,
    )


@dataclass
class Soak:
    """Clients of one server, and what they have seen.

    Attributes:
        server: The server.
        models: Its models.
        requests: What clients ask for.
        expected: What `references` returns for them.
        seed: Of the clients' choices.
    """

    server: Server
    models: Models
    requests: list[Request]
    expected: list[list[list[Answer]]]
    seed: int
    counts: Counter = field(default_factory=Counter)
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    target: int = 0

    @property
    def interruptions(self) -> int:
        """Resets and sleeps so far."""
        return self.counts["resets"] + self.counts["sleeps"]

    async def run(self, seconds: float, interruptions: int = 0) -> None:
        """Rounds of traffic; AssertionError tells what went wrong.

        Args:
            seconds: So long, in whole rounds, and as many as leaks show in.
            interruptions: Up to four times as long, until there were so many.
        """
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.server.address, timeout=TIMEOUT_SECONDS, limits=limits
        ) as http:
            self.http, self.sleeping = http, asyncio.Lock()
            start = time.monotonic()
            while (
                (passed := time.monotonic() - start) < seconds
                or self.counts["rounds"] < LEAST_ROUNDS
                or (self.interruptions < interruptions and passed < 4 * seconds)
            ):
                until = start + passed + ROUND_SECONDS
                await asyncio.gather(
                    *(self.client(i, until) for i in range(NUM_CLIENTS))
                )
                await self.check_idle()
                await self.change_weights()
                self.counts["rounds"] += 1
            self.check_metrics()
            self.memory.check()

    async def client(self, number: int, until: float) -> None:
        """One request after the other."""
        rng = random.Random(f"{self.seed} {self.counts['rounds']} {number}")
        while time.monotonic() < until:
            index = rng.randrange(len(self.requests))
            kind = rng.choices(
                ["whole", "stream", "close", "cancel", "reset", "sleep"],
                [40, 40, 20, 10, 3, 3],
            )[0]
            request = self.requests[index]
            body = {
                **request.params,
                "model": "target" if request.lora is None else f"lora{request.lora}",
                "prompt": request.prompt,
                "return_token_ids": True,
            }
            try:
                if kind == "reset":
                    await self.post("/reset_prefix_cache?reset_running_requests=true")
                    self.counts["resets"] += 1
                elif kind == "sleep":
                    await self.sleep()
                elif kind == "cancel":
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.whole(body), rng.uniform(0, 0.5))
                    self.counts["aborts"] += 1
                elif kind == "whole":
                    self.check(index, await self.whole(body))
                else:
                    # What was asked for may end first.
                    most = rng.randint(0, 40) if kind == "close" else None
                    answers, complete = await self.stream(body, most)
                    self.check(index, answers, complete)
            except (TimeoutError, AssertionError, httpx.HTTPError) as error:
                raise AssertionError(
                    f"{error!r}, {kind}, target {self.target}: {json.dumps(body)}"
                ) from error

    async def sleep(self) -> None:
        """Requests wait without their K/V; on a CPU vLLM keeps the weights."""
        async with self.sleeping:
            await self.post("/sleep?level=1&mode=keep")
            await asyncio.sleep(0.1)
            await self.post("/wake_up")
        self.counts["sleeps"] += 1

    async def post(self, path: str, body: dict | None = None) -> dict:
        """The answer to a request that must succeed."""
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json() if response.content else {}

    async def whole(self, body: dict) -> list[Answer]:
        """All texts of a request."""
        answer = await self.post("/v1/completions", body)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [_answer([choice]) for choice in choices]

    async def stream(self, body: dict, most: int | None) -> tuple[list[Answer], bool]:
        """Texts as they come, and whether they are complete.

        Args:
            body: The request.
            most: Leave after so many pieces; None for never.
        """
        pieces: list[list[dict]] = [[] for _ in range(body.get("n", 1))]
        count, done = 0, False
        async with self.http.stream(
            "POST", "/v1/completions", json={**body, "stream": True}
        ) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if count == most:
                    break
                if line == "data: [DONE]":
                    done = True
                elif line:
                    piece = json.loads(line.removeprefix("data: "))
                    assert "choices" in piece, piece
                    for choice in piece["choices"]:
                        pieces[choice["index"]].append(choice)
                    count += 1
        return [_answer(of_text) for of_text in pieces], done

    def check(self, index: int, answers: list[Answer], complete: bool = True) -> None:
        """Compare with plain decoding; of what was left, what came."""
        expected = self.expected[self.target][index]
        assert len(answers) == len(expected), (answers, expected)
        for got, want in zip(answers, expected, strict=True):
            assert got.begins(want), (got, want)
            assert not complete or want.begins(got), (got, want)
            self.counts["tokens"] += len(got.tokens)
        self.counts["requests" if complete else "aborts"] += 1
        if complete:
            self.counts["texts"] += len(answers)

    async def check_idle(self) -> None:
        """Between rounds nothing is held: no request, block or row."""
        deadline = time.monotonic() + 20
        while not (idle := self.server.metrics().idle) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert idle, "requests or blocks are left"
        # It fails where a block is in use.
        assert (await self.post("/reset_prefix_cache"))["success"], "blocks are left"
        rows = await self.ask_worker("free_rows")
        assert rows == str(LLM["max_num_seqs"]), f"{rows} rows are free"
        processes = [psutil.Process(self.server.process.pid), *self.server.children]
        self.memory.look(processes)

    async def change_weights(self) -> None:
        """The other set of weights takes the place of this one."""
        self.target = 1 - self.target
        path = self.models.targets[self.target]
        await self.ask_worker("reload_weights", weights_path=path)

    async def ask_worker(self, method: str, **kwargs: str) -> str | None:
        """What the worker answers."""
        body = {"method": method, "kwargs": kwargs}
        return (await self.post("/collective_rpc", body))["results"][0]

    def check_metrics(self) -> None:
        """What the server has counted is what the clients have seen."""
        found = self.server.metrics()
        found.check_trees()
        assert found["vllm:spec_decode_num_accepted_tokens_total"] > 0
        reasons = found.by("finished_reason", "vllm:request_success_total")
        finished = reasons["stop"] + reasons["length"]
        # A text of a request that somebody left may have been complete.
        most = self.counts["texts"] + 3 * self.counts["aborts"]
        assert self.counts["texts"] <= finished <= most, (reasons, self.counts)
        assert not reasons["error"], reasons
        assert found["vllm:generation_tokens_total"] >= self.counts["tokens"]
        self.counts["preemptions"] = int(found["vllm:num_preemptions_total"])
        self.counts["accepted"] = int(
            found["vllm:spec_decode_num_accepted_tokens_total"]
        )
        self.counts["prefix hits"] = int(found["vllm:prefix_cache_hits_total"])
        for name in ("requests", "aborts", "preemptions", "prefix hits", "accepted"):
            assert self.counts[name], f"no {name}"


def _answer(pieces: list[dict]) -> Answer:
    """One text from the pieces it came in."""
    logprobs = [p["logprobs"]["token_logprobs"] for p in pieces if p.get("logprobs")]
    return Answer(
        "".join(p["text"] for p in pieces),
        sum((p["token_ids"] or [] for p in pieces), []),
        sum(logprobs, []),
    )


def main() -> int:
    """Soak both schedulers, half of the time each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--requests", type=int, default=150, help="distinct ones")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = make_models(folder)
        requests = the_requests(args.requests, args.seed)
        print(f"{len(requests)} requests, seed {args.seed}: plain decoding", flush=True)
        expected = references(models, requests)
        for scheduler in ("static", "auto"):
            with start(models, folder, scheduler) as server:
                soak = Soak(server, models, requests, expected, args.seed)
                try:
                    asyncio.run(soak.run(args.minutes * 30))
                except AssertionError as error:
                    print(server.log.read_text()[-5000:], f"FAILED: {error}", sep="\n")
                    return 1
            counts = ", ".join(f"{n} {name}" for name, n in sorted(soak.counts.items()))
            print(
                f"scheduler {scheduler}, {args.minutes * 30:.0f} s: {counts}; "
                f"{soak.memory}",
                flush=True,
            )
    print("every text is that of plain decoding, nothing is left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
