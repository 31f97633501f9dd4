"""Model Runner V2 on a CPU build of vLLM, without a Triton backend.

Symptom: vLLM refuses Model Runner V2 when Triton cannot run, and its step launches
    small Triton kernels that the CPU build only has as plain functions.
Reason: V2 is the only runner with the hooks that tree speculation needs.
Removed when: vLLM's CPU build runs Model Runner V2 by itself.
"""

import os

from vllm_specinfer.hooks.speculative_config import V2_ENV

# The flag's value from before ``enable_in_frontend``; empty when it is not enabled.
_flag_before: list[bool] = []


def enable_in_frontend() -> None:
    """Let engine configs of this process choose Model Runner V2.

    Symptom: ``VllmConfig`` raises "Model Runner V2 requires Triton".
    Reason: the check reads whether Triton can run, not whether its kernels have
        replacements. Call it only for engines of method specinfer: while it is on,
        every CPU engine of the process gets V2.
    Removed when: the check accepts registered kernels.
    """
    import vllm.config.vllm as config

    if not _flag_before:
        _flag_before.append(config.HAS_TRITON)
    config.HAS_TRITON = True
    os.environ.setdefault(V2_ENV, "1")


def disable_in_frontend() -> None:
    """Undo ``enable_in_frontend`` for later engines, less the environment."""
    import vllm.config.vllm as config

    if _flag_before:
        config.HAS_TRITON = _flag_before.pop()


def enable_in_worker() -> None:
    """Make this worker process able to run Model Runner V2's step on CPU.

    Call it before the model runner is built. Calling it again does nothing.

    Symptom: without it the first step fails with "'function' object is not
        subscriptable", or on a name that the Triton placeholder lacks.
    Reason: the CPU build's ``vllm.triton_utils.triton`` is a placeholder, and copies
        of a config inside the worker run the Triton check again.
    Removed when: vLLM's CPU build runs Model Runner V2 by itself.

    Raises:
        RuntimeError: vLLM lacks a kernel that must be replaced.
    """
    # It patches torch's accelerator API and must precede imports of worker.gpu.
    import vllm.v1.worker.cpu.shm  # noqa: F401, I001
    import vllm.v1.worker.gpu_worker as gpu_worker
    from vllm.triton_utils import triton
    from vllm.utils.math_utils import next_power_of_2

    from vllm_specinfer.kernels.cpu import step_kernels

    enable_in_frontend()
    if hasattr(gpu_worker, "HAS_TRITON"):
        # vLLM 0.33 checks in the worker as well.
        gpu_worker.HAS_TRITON = True
    if not hasattr(triton, "next_power_of_2"):
        triton.next_power_of_2 = next_power_of_2
    step_kernels.register()
