"""What vLLM makes of an engine's arguments on a GPU, found out without one.

``python -m tests.cuda_front_end TARGET SSM`` prints it as JSON. The platform is vLLM's
own for CUDA, with answers for the questions that it would ask the driver.
"""

import json
import os
import sys
from types import ModuleType


def main() -> None:
    """Print what the engine's config and its attention layers would be."""
    # The compiled part of vLLM's CUDA build.
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    import torch
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "a GPU that is not there"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

    vllm.platforms._current_platform = Hopper()
    import vllm.config.vllm
    from vllm import EngineArgs
    from vllm.v1.attention.selector import get_attn_backend

    from vllm_specinfer import plugin
    from vllm_specinfer.attention import cuda
    from vllm_specinfer.refusals import CUDA_ENV

    vllm.config.vllm.HAS_TRITON = True
    os.environ[CUDA_ENV] = "1"
    plugin.register()
    target, ssm = sys.argv[1:]
    config = EngineArgs(
        model=target,
        skip_tokenizer_init=True,
        speculative_config={"method": "specinfer", "model": ssm},
    ).create_engine_config()
    cuda.register()  # as the worker does
    with vllm.config.set_current_vllm_config(config):
        backends = [
            get_attn_backend(64, torch.bfloat16, kv_cache_dtype)
            for kv_cache_dtype in ("auto", "fp8")
        ]
    found = {
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "capture_sizes": config.compilation_config.cudagraph_capture_sizes,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "scheduler_cls": config.scheduler_config.scheduler_cls,
        "worker_cls": config.parallel_config.worker_cls,
        "v2": config.use_v2_model_runner,
        "backends": [backend.__name__ for backend in backends],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
