"""The next engine on a CPU finds what this one has compiled.

Symptom: every start compiles all models again, with the warning "Compiling model again
    due to a load failure ... 'function' object has no attribute 'finalize_loading'".
Reason: ``vllm/compilation/decorators.py`` saves what torch has compiled ahead of time,
    and fails to load it where inductor alone compiles, as on CPUs. What is compiled in
    a model's first call is kept by inductor, if in a folder that a reboot may empty.
Removed when: vLLM loads what it has saved.
"""

import os

AOT_ENV = "VLLM_USE_AOT_COMPILE"
FOLDER_ENV = "TORCHINDUCTOR_CACHE_DIR"


def enable() -> None:
    """Compile in the first call, and keep that in vLLM's cache, where nobody objects.

    It holds for this process, for good, and for those it starts: vLLM looks at the
    variable whenever a model runs.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from vllm import envs

    if AOT_ENV in os.environ:
        return
    os.environ[AOT_ENV] = "0"
    # Torch itself may have set it.
    if os.environ.get(FOLDER_ENV) in (None, default_cache_dir()):
        os.environ[FOLDER_ENV] = os.path.join(
            envs.VLLM_CACHE_ROOT, "torch_compile_cache", "inductor"
        )
