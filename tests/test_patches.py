"""The upstream form of each hook applies to the installed vLLM, and does its work."""

import compileall
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes, vllm_copy
from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama
from vllm_specinfer import compat, seams

PATCHES = Path(__file__).parents[1] / "patches"
RELEASE = compat.release(seams.VllmSource(vllm_copy.INSTALLED).version)
REGISTER = (PATCHES / "README.md").read_text()

# The engine of a patched vLLM, every hook off: the plugin is not loaded, and of the CPU
# hook only vLLM's own `register_kernels` is left.
WITHOUT_HOOKS = """
import json, sys
import vllm.v1.worker.cpu.shm
import vllm.config.vllm
from vllm import EngineArgs, SamplingParams
from vllm.config.speculative import register_speculative_method
from vllm.triton_utils import HAS_TRITON, triton
from tests.e2e import engine
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.model_executor.layers.utils import (
    cpu_linear_kernels, dispatch_cpu_unquantized_gemm
)
from vllm_specinfer.hooks import (
    cpu_linear, cpu_v2, request_limits, speculative_config, stat_loggers
)
from vllm_specinfer.kernels.cpu.linear import take_over
from vllm_specinfer.kernels.cpu import step_kernels

cpu_v2.enable_in_frontend = cpu_v2.disable_in_frontend = lambda: None
cpu_v2.enable_in_worker = step_kernels.register
cpu_linear.install = stat_loggers.install = request_limits.install = lambda: None
taken = []
def noted(*layer):
    taken.append(take_over(*layer))
    return taken[-1]
cpu_linear_kernels.append(noted)
register_speculative_method("specinfer", speculative_config._create)
result = engine._generate(json.loads(sys.argv[1]))
assert not hasattr(dispatch_cpu_unquantized_gemm, "_specinfer_original")
assert any(taken)
assert not HAS_TRITON and not vllm.config.vllm.HAS_TRITON
assert triton.next_power_of_2.__module__ == "vllm.utils.math_utils"
for owner, name in (
    (EngineArgs, "create_speculative_config"),
    (SamplingParams, "_validate_spec_decode"),
    (InputProcessor, "process_inputs"),
    (StatLoggerManager, "__init__"),
):
    assert not hasattr(getattr(owner, name), "_specinfer_original")
print("RESULT", json.dumps([vllm.__file__, result]))
"""


def patches_of(release):
    files = [*PATCHES.glob("*.patch"), *(PATCHES / release).glob("*.patch")]
    return sorted(files, key=lambda file: file.name)


def apply(folder):
    """All patches, to the installed vLLM, linked into a folder."""
    patches = patches_of(RELEASE)
    names = re.findall(
        r"^--- a/(.+)$", "".join(p.read_text() for p in patches), re.MULTILINE
    )
    vllm_copy.link(folder, names)
    # A repository of its own: below another one git apply would skip the files.
    subprocess.run(["git", "init", "-q", folder], check=True)
    for patch in patches:
        subprocess.run(["git", "apply", patch], cwd=folder, check=True)
    return names


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patched")
    return folder, apply(folder)


def test_the_patches_apply_together_to_the_installed_sources(patched):
    folder, names = patched
    assert names
    for name in names:
        assert compileall.compile_file(folder / name, quiet=1)
        original = (vllm_copy.INSTALLED / name).read_text()
        assert (folder / name).read_text() != original


def test_a_patched_vllm_needs_no_hook(patched, tmp_path):
    folder, _ = patched
    target = tiny_llama(tmp_path / "target", seed=0)
    ssm = noisy_copy(target, tmp_path / "ssm", noise=0.05)
    config = {"method": "specinfer", "model": ssm, "scheduler": "static"}
    params = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    job = {
        "prompts": [[1, 2, 3], [7, 8, 9, 10, 11]],
        "params": [params, {**params, "logit_bias": {"5": 4.0}, "logprobs": 2}],
        "llm": {
            "model": target,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 64,
            "enforce_eager": True,
        },
    }
    (plain,) = engine.run([job])
    job["llm"]["speculative_config"] = config
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HOOKS, json.dumps(job)],
        env={
            **os.environ,
            **processes.ENV,
            "VLLM_PLUGINS": "",
            "PYTHONPATH": f"{folder}{os.pathsep}{PATCHES.parent}",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("RESULT")]
    file, result = json.loads(line.removeprefix("RESULT"))
    assert Path(file).is_relative_to(folder)
    assert result["drafts"] > 0 and result["accepted"] > 0
    assert result["tokens"] == plain["tokens"]
    assert result["metrics"]["accepted_tokens ssm0"] == result["accepted"]


@pytest.mark.parametrize("release", compat.SUPPORTED)
def test_the_register_names_every_patch(release):
    patches = patches_of(release)
    assert {p.name for p in patches} == {p.name for p in patches_of(RELEASE)}
    for patch in patches:
        assert f"`{patch.stem}`" in REGISTER


def test_the_register_has_the_hashes_of_what_is_replaced():
    rows = re.findall(r"^\| `(vllm\S+)` \|.*`(\w{16})`.*`(\w{16})`", REGISTER, re.M)
    assert len(rows) == 5
    for name, *hashes in rows:
        for release, code in zip(compat.SUPPORTED, hashes, strict=True):
            table = seams.table(release).items()
            (found,) = [s for key, s in table if key.replace(":", ".") == name]
            assert found["code"] == code, name
