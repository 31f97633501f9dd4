"""The next engine on a CPU finds what this one has compiled.

Symptom: every start compiles all models again, with the warning "Compiling model again
    due to a load failure ... 'function' object has no attribute 'finalize_loading'".
Reason: ``vllm/compilation/decorators.py`` saves what torch has compiled ahead of time,
    and fails to load it where inductor alone compiles, as on CPUs. What is compiled in
    a model's first call is kept by inductor, if in a folder that a reboot may empty.
Removed when: vLLM loads what it has saved.
"""

import hashlib
import os
from pathlib import Path

AOT_ENV = "VLLM_USE_AOT_COMPILE"
FOLDER_ENV = "TORCHINDUCTOR_CACHE_DIR"

# What `enable` has set, and what it was before.
_before: dict[str, str | None] = {}


def enable() -> None:
    """Compile in the first call, and keep that in vLLM's cache, where nobody objects.

    It holds for this process and for those it starts: vLLM looks at the variable
    whenever a model runs.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from vllm import envs

    # Without the hook, what a call has compiled would run the layers of other models.
    of_each_model = envs.VLLM_USE_BYTECODE_HOOK
    if AOT_ENV in os.environ or envs.VLLM_DISABLE_COMPILE_CACHE or not of_each_model:
        return
    _set(AOT_ENV, "0")
    # Torch itself may have set it.
    if os.environ.get(FOLDER_ENV) in (None, default_cache_dir()):
        _set(FOLDER_ENV, str(_folder()))


def disable() -> None:
    """Leave it to vLLM how processes compile that this one starts from now on."""
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()


def _set(name: str, value: str) -> None:
    _before[name] = os.environ.get(name)
    os.environ[name] = value


def _folder() -> Path:
    """Of this CPU, this vLLM and our operators: inductor keeps code for the one, with
    the arguments that operators have in the others, and asks for none of them."""
    import torch
    from vllm import __version__, envs

    from vllm_specinfer.cache import cpu
    from vllm_specinfer.kernels.cpu.extension import OPERATORS

    made_for = cpu(), torch.backends.cpu.get_cpu_capability(), __version__
    made_for += (OPERATORS.read_bytes(),)
    key = hashlib.sha256(repr(made_for).encode()).hexdigest()[:16]
    return Path(envs.VLLM_CACHE_ROOT, "torch_compile_cache", f"inductor-{key}")
