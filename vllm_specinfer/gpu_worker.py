"""The worker on CUDA."""

from vllm.utils.platform_utils import is_uva_available

from vllm_specinfer.options import XFORMERS
from vllm_specinfer.worker import TreeWorker

# By vLLM's names (vllm/v1/worker/gpu_worker.py: _get_sleep_parameters).
DRAFT_PARAMETERS = "draft.*"


class SpecInferGPUWorker(TreeWorker):
    """vLLM's GPU worker."""

    def init_device(self) -> None:
        """As `TreeWorker`.

        Raises:
            ValueError: The device cannot write to host memory.
        """
        if not is_uva_available():
            raise ValueError(
                "pinned host memory must be available for method specinfer on CUDA, "
                "where drafting reads the texts; got none"
            )
        # vLLM reloads only the target after a sleep that loses weights.
        kept = self.model_config.sleep_preserve_parameter_names
        if DRAFT_PARAMETERS not in kept:
            kept.append(DRAFT_PARAMETERS)
        super().init_device()

    def register_attention(self) -> None:
        """Fill CUSTOM, which the front end has chosen (hooks/cuda_arguments.py)."""
        from vllm_specinfer.attention import cuda

        if self._tree_attention == XFORMERS:
            from vllm_specinfer.attention.xformers import XformersBackend

            cuda.register(XformersBackend)
        else:
            cuda.register()

    @property
    def attention_summary(self) -> str:
        """The backend, and what it has been tested on."""
        kernels = "xFormers" if self._tree_attention == XFORMERS else "Triton kernels"
        return f"CUSTOM, {kernels}; never run on a GPU"

    @property
    def _tree_attention(self) -> str:
        return self.vllm_config.speculative_config.options.tree_attention
