"""The worker on a CPU."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specinfer.hooks import cpu_linear, cpu_v2
from vllm_specinfer.worker import TreeWorker


class SpecInferCPUWorker(TreeWorker, CPUWorker):
    """vLLM's CPU worker with Model Runner V2."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        cpu_v2.enable_in_worker()
        cpu_linear.install()
        super().__init__(vllm_config, *args, **kwargs)

    def register_attention(self) -> None:
        """Replace CPU_ATTN."""
        from vllm_specinfer.attention import cpu

        cpu.register()

    @property
    def attention_summary(self) -> str:
        """The backend, and whether the C++ kernels are there."""
        from vllm_specinfer.kernels.cpu import extension

        if extension.load():
            return "CPU_ATTN, C++ kernels"
        return "CPU_ATTN, plain torch without C++ kernels"
