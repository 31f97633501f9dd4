"""The CUDA path on a GPU, where there is one: kernels, texts, and nobody waits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PARTS = (*(f"equality{way}" for way in ("", "_async", "_graphs", "_offload")),)
PARTS += ("start", "waits")


def run(script: str, *args: str) -> None:
    command = [sys.executable, ROOT / "benchmarks" / script, *map(str, args)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-5000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_are_right() -> None:
    run("cuda_kernels.py", "--check-only")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("part", PARTS)
def test_an_engine_is_right_and_does_not_wait(part, tmp_path) -> None:
    run("cuda_engine.py", "--parts", part, "--prompts", 8, "--out", tmp_path)
