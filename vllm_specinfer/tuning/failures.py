"""What torch and safetensors say of full disks, short memory and broken files."""

import contextlib
import re
from collections.abc import Iterator

import torch
from safetensors import SafetensorError

# In RuntimeErrors of torch's allocator, and of its readers and writers of files.
_OUTSIDE = re.compile(r"enforce fail|PytorchStream")
# In vLLM's, whose engine has a process of its own on CUDA.
_ENGINE = "Engine core initialization failed"


@contextlib.contextmanager
def in_a_sentence() -> Iterator[None]:
    """Raises OSError in their place; what else goes wrong stays as it is."""
    try:
        yield
    except (SafetensorError, RuntimeError, MemoryError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if _ENGINE in reason:
            raise OSError(
                f"the target's engine must start; got what it says above, {reason}"
            ) from error
        known = not isinstance(error, RuntimeError) or _OUTSIDE.search(reason)
        if known or isinstance(error, torch.OutOfMemoryError):
            raise OSError(
                f"disk and memory must suffice and files be whole; got {reason}"
            ) from error
        raise
