"""Linear layers on a CPU that take the rows of a tree as quickly as one.

Symptom: a pass over 9 rows takes a third longer than over one.
Reason: vLLM chooses how a CPU multiplies in one function, after loading a layer.
Removed when: vLLM lets a plugin register a linear kernel for CPUs.
"""

from collections.abc import Callable

from torch import nn

from vllm_specinfer.hooks import wrap


def install() -> None:
    """Wrap ``dispatch_cpu_unquantized_gemm`` once; engines of other methods keep it."""
    from vllm.config.vllm import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils

    from vllm_specinfer.config import SpecInferConfig
    from vllm_specinfer.kernels.cpu.linear import take_over

    def dispatch(
        original: Callable[..., None], layer: nn.Module, remove_weight: bool
    ) -> None:
        config = get_current_vllm_config_or_none()
        spec = getattr(config, "speculative_config", None)
        ours = isinstance(spec, SpecInferConfig)
        if ours and (linear := take_over(layer, remove_weight)):
            spec.linear_kernels.append(repr(linear))
        else:
            original(layer, remove_weight)

    wrap(utils, "dispatch_cpu_unquantized_gemm", dispatch)
