"""Tiny models and prompts that the commands can use."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import processes
from tests.e2e.engine import KV_BYTES
from tests.e2e.models import VOCAB, add_tokenizer, noisy_copy, tiny_llama
from vllm_specinfer import cli

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": KV_BYTES,
}


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Options of a command: tiny models and 12 prompts."""
    folder: Path = tmp_path_factory.mktemp("models")
    # As many positions as the benchmarks' engines have.
    target = tiny_llama(folder / "target", seed=0, max_position_embeddings=2048)
    ssm = noisy_copy(target, folder / "ssm", noise=0.05)
    add_tokenizer(target, ssm)
    prompts = folder / "prompts.jsonl"
    ids = np.random.default_rng(0).integers(0, VOCAB, (12, 9)).tolist()
    prompts.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in ids))
    return {
        "target": target,
        "ssm": ssm,
        "prompts": str(prompts),
        "engine": json.dumps(ENGINE),
    }


@pytest.fixture(scope="package")
def run_command(
    tiny: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """``run_command("bench", out=...)`` with tiny models and 12 prompts."""

    def run(command: str, *arguments: str, **options: object) -> str:
        given = (f"--{name}={value}" for name, value in {**tiny, **options}.items())
        output = tmp_path_factory.mktemp("output") / command
        return processes.run(cli.main, [command, *given, *arguments], output)

    return run
