"""Switches in the environment."""

import os

ANY_VLLM_ENV = "VLLM_SPECINFER_ANY_VLLM"
CACHE_ENV = "VLLM_SPECINFER_CACHE"
CUDA_ENV = "VLLM_SPECINFER_CUDA"
DEBUG_ENV = "VLLM_SPECINFER_DEBUG"
DISABLE_ENV = "VLLM_SPECINFER_DISABLE"
SWITCHES = (ANY_VLLM_ENV, CACHE_ENV, CUDA_ENV, DEBUG_ENV, DISABLE_ENV)


def is_on(name: str) -> bool:
    """Whether a variable is set to anything but 0."""
    return os.environ.get(name, "0") not in ("", "0")
