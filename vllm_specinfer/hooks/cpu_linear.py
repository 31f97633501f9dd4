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
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    from vllm_specinfer.config import SpecInferConfig
    from vllm_specinfer.kernels.cpu import huge_pages
    from vllm_specinfer.kernels.cpu.linear import take_over

    def dispatch(
        original: Callable[..., None], layer: nn.Module, remove_weight: bool
    ) -> None:
        config = get_current_vllm_config_or_none()
        spec = getattr(config, "speculative_config", None)
        ours = isinstance(spec, SpecInferConfig)
        if not ours or (linear := take_over(layer, remove_weight)) is None:
            original(layer, remove_weight)
            return
        before = get_layerwise_info(layer).kernel_tensors
        if before is None:
            spec.linear_kernels.append(repr(linear))
        elif remove_weight and before[0]["weight"].shape != layer.weight.shape:
            # vLLM copies the new one there, which has more bytes or fewer.
            new = layer.weight
            memory = huge_pages.empty(new.numel(), new.dtype)
            before[0]["weight"].data = memory.view(new.shape)

    wrap(utils, "dispatch_cpu_unquantized_gemm", dispatch)
