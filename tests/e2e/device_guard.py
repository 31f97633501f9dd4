"""Pretends that a CPU's memory were a device's, and notices who forgets it.

Every tensor counts as the device's but those that the package makes itself without
going through `vllm_specinfer.device`: on a GPU these would lie in the host's memory.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

import vllm_specinfer
from vllm_specinfer import device
from vllm_specinfer.scheduling import invariants

PACKAGE = str(Path(vllm_specinfer.__file__).parent)
# Whoever calls is outside.
INSIDE = (str(Path(torch.__file__).parent), __file__)
# What never runs on a GPU.
ON_CPU_ONLY = str(Path(PACKAGE) / "kernels" / "cpu")
READS = {
    *(torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu),
    *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__),
    *(torch.Tensor.__index__, torch.Tensor.__array__),
}
# The shape of what they give is the device's to know, and the host waits for it.
SHAPES = {
    *(torch.nonzero, torch.Tensor.nonzero, torch.unique, torch.Tensor.unique),
    *(torch.masked_select, torch.Tensor.masked_select),
    *(torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose),
}
INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
FACTORIES = {torch.tensor, torch.zeros, torch.ones, torch.empty, torch.full} | {
    torch.arange
}


class DeviceGuard(TorchFunctionMode):
    """Raises where the package reads from the device or hands it the host's memory.

    Attributes:
        num_reads: How often the engine waited for the device, the tests' own looks at
            its blocks aside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0
        self._on_host = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        caller = _caller()
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        on_device = [t for t in tensors if t not in self._on_host]
        asks = func in READS or _asks_for_shapes(func, args)
        reads = asks and on_device and _is_package(caller)
        if reads and caller != device.__file__:
            raise AssertionError(f"{caller} reads from the device: {func}")
        mixes = on_device and any(t in self._on_host and t.dim() for t in tensors)
        if mixes and func not in (torch.Tensor.copy_, torch.Tensor.to):
            raise AssertionError(f"{caller} mixes host and device: {func}")
        result = func(*args, **kwargs)
        made = func in FACTORIES and kwargs.get("device") is None
        if (tensors and not on_device) or (made and _is_package(caller)):
            self._mark(result, caller)
        return result

    def from_numpy(self, original: Callable, array: Any) -> torch.Tensor:
        """`torch.from_numpy`, which no mode sees."""
        result = original(array)
        caller = _caller()
        if _is_package(caller):
            self._mark(result, caller)
        return result

    def waited(self, original: Callable, *args: Any) -> Any:
        """`device._waited`, where the host waits; who sends outputs may."""
        frame, files = sys._getframe(1), set()
        while frame is not None:
            files.add(frame.f_code.co_filename)
            frame = frame.f_back
        on_main = threading.current_thread() is threading.main_thread()
        self.num_reads += on_main and invariants.__file__ not in files
        return original(*args)

    def check(self, what: str, *values: Any) -> None:
        """Tensors that a kernel reads must be the device's."""
        for value in values:
            if is_dataclass(value):
                found = {f.name: getattr(value, f.name) for f in fields(value)}
                found = {k: v for k, v in found.items() if not k.endswith("_cpu")}
                self.check(what, *found.values())
            else:
                for leaf in tree_leaves(value):
                    if torch.is_tensor(leaf) and leaf in self._on_host:
                        raise AssertionError(f"{what} gets a tensor of the host")
                    if is_dataclass(leaf):
                        self.check(what, leaf)

    def _mark(self, result: Any, caller: str) -> None:
        if caller != device.__file__:
            for tensor in _tensors([result]):
                self._on_host[tensor] = True


@contextmanager
def guarded(launches: dict[str, int]) -> Iterator[DeviceGuard]:
    """Guard everything that runs inside; count launches of kernels by name."""
    from vllm_specinfer import model_state, worker
    from vllm_specinfer.attention import cuda as attention
    from vllm_specinfer.drafting import output_head, ssm, tree_graphs
    from vllm_specinfer.verify import device_sampler, sampler

    guard = DeviceGuard()

    def checked(module: Any, name: str) -> Any:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            launches[name] = launches.get(name, 0) + 1
            guard.check(name, args, kwargs)
            result = original(*args, **kwargs)
            return result

        return mock.patch.object(module, name, call)

    def given(cls: type, name: str) -> Any:
        original = getattr(cls, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            guard.check(f"what {name} returns", result)
            return result

        return mock.patch.object(cls, name, call)

    from_numpy, waited = torch.from_numpy, device._waited
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(
                device, "_waited", lambda *args: guard.waited(waited, *args)
            )
        )
        for module, name in (
            (device_sampler, "verify_draws"),
            (device_sampler, "walk_trees"),
            (tree_graphs, "coupled_children"),
            (attention, "tree_attention"),
            (attention, "commit_paths"),
            (ssm, "set_forward_context"),
            (sampler, "get_num_sampled_and_rejected"),
        ):
            stack.enter_context(checked(module, name))
        for cls, name in (
            (model_state.TreeModelState, "prepare_attn"),
            (model_state.TreeModelState, "prepare_inputs"),
            (device_sampler.DeviceTreeSampler, "__call__"),
        ):
            stack.enter_context(given(cls, name))
        stack.enter_context(
            mock.patch.object(
                torch, "from_numpy", lambda array: guard.from_numpy(from_numpy, array)
            )
        )
        for module in (device, model_state, output_head, worker):
            stack.enter_context(
                mock.patch.object(module, "is_host", lambda device: False)
            )
        with guard:
            yield guard


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _asks_for_shapes(func: Callable, args: tuple) -> bool:
    if func in INDEXING:
        masks = _tensors(args[1:2])
        return any(mask.dtype == torch.bool and mask.dim() for mask in masks)
    if func in (torch.repeat_interleave, torch.Tensor.repeat_interleave):
        return torch.is_tensor(args[-1])
    return func in SHAPES or (func is torch.where and len(args) == 1)


def _is_package(file: str) -> bool:
    return file.startswith(PACKAGE) and not file.startswith(ON_CPU_ONLY)


def _caller() -> str:
    """The file of the nearest code outside torch and this one."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(INSIDE) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename
