"""A CPU worker whose attention and commit are CUDA's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import (
    AttentionBackendEnum,
    register_backend,
)
from vllm.v1.worker.gpu.warmup import warmup_kernels

from vllm_specinfer.attention.cuda import CUDATreeAttentionBackend
from vllm_specinfer.cpu_worker import SpecInferCPUWorker


class InterpretedBackend(CUDATreeAttentionBackend):
    """CUDA's backend under the only name that the CPU platform chooses."""

    @staticmethod
    def get_name() -> str:
        """The name of the enum member."""
        return AttentionBackendEnum.CPU_ATTN.name


class InterpretedWorker(SpecInferCPUWorker):
    """Runs CUDA's path."""

    def register_attention(self) -> None:
        """Replace CPU_ATTN."""
        register_backend(
            AttentionBackendEnum.CPU_ATTN, f"{__name__}.{InterpretedBackend.__name__}"
        )
        selector._cached_get_attn_backend.cache_clear()

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's GPU worker, which runs made-up steps before the first real one."""
        warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
        return super().compile_or_warm_up_model()


@contextmanager
def counted(counter: Callable[[], int]) -> Iterator[list[int]]:
    """What a counter says at the end of each step."""
    from vllm_specinfer.speculator import TreeSpeculator

    propose, found = TreeSpeculator.propose, []

    def proposed(*args: Any, **kwargs: Any) -> Any:
        result = propose(*args, **kwargs)
        found.append(counter())
        return result

    with mock.patch.object(TreeSpeculator, "propose", proposed):
        yield found
