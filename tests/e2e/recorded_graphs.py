"""CUDA graphs on a CPU: what is launched is recorded, and a replay launches it again.

In the place of `torch.cuda.CUDAGraph` and `torch.cuda.graph`. As on a GPU, a replay
knows the tensors of the capture and what was launched over them, and nothing that the
host has learned since; what would wait for the device cannot be captured.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Their shapes or results are the host's to know.
WAITS = {
    *(aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2),
    *(aten._local_scalar_dense, aten.is_nonzero, aten.equal),
}
# Nobody reads what they leave.
EMPTY = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided}


class RecordedGraph:
    """In the place of a `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], Any]] = []
        GRAPHS.add(self)

    def replay(self) -> None:
        """Launch everything again, into the same tensors."""
        with torch._C.DisableTorchFunction():
            for launch in self.launches:
                launch()


# All that somebody still has.
GRAPHS: weakref.WeakSet[RecordedGraph] = weakref.WeakSet()


class Recorder(TorchDispatchMode):
    """Records what is launched while it is entered."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._check(func, args)
        outputs = func(*args, **kwargs)
        if func.overloadpacket not in EMPTY:
            launch = partial(_again, outputs, func, args, kwargs)
            self.graph.launches.append(launch)
        return outputs

    def launch(self, kernel: Callable[[], None]) -> None:
        """Run and record what is no operator of torch."""
        with _disable_current_modes():
            kernel()
        self.graph.launches.append(kernel)

    def _check(self, func: Any, args: tuple) -> None:
        by_mask = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_)
        if by_mask:
            indices = [i for i in args[1] if i is not None]
            by_mask = any(i.dtype in (torch.bool, torch.uint8) for i in indices)
        counts = func is aten.repeat_interleave.Tensor
        if func.overloadpacket in WAITS or by_mask or counts:
            raise AssertionError(f"{func} cannot be captured: it waits for the device")


def _again(outputs: Any, func: Any, args: tuple, kwargs: dict) -> None:
    found = func(*args, **kwargs)
    for kept, new in zip(tree_leaves(outputs), tree_leaves(found), strict=True):
        # Views, and what was written in place, are there already.
        if torch.is_tensor(kept) and kept.data_ptr() != new.data_ptr():
            kept.copy_(new)


@contextmanager
def recorded() -> Iterator[None]:
    """Graphs are recorded, kernels that Triton interprets among them."""
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.platforms.cpu import CpuPlatform

    recorders: list[Recorder] = []
    run = InterpretedFunction.run

    @contextmanager
    def graph(graph: RecordedGraph, *_: Any, **__: Any) -> Iterator[None]:
        assert not recorders, "a graph is captured while another one is"
        recorder = Recorder(graph)
        recorders.append(recorder)
        try:
            with recorder:
                yield
        finally:
            recorders.clear()

    def launched(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = partial(run, self, *args, warmup=warmup, **kwargs)
        if recorders and not warmup:
            recorders[0].launch(kernel)
        else:
            kernel()

    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "CUDAGraph", RecordedGraph),
            (torch.cuda, "graph", graph),
            (InterpretedFunction, "run", launched),
            # An operator of vLLM's would hide from the recorder what it launches.
            (CpuPlatform, "opaque_attention_op", classmethod(lambda cls: False)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        pool = mock.patch.object(
            CpuPlatform, "graph_pool_handle", lambda self: (0, 0), create=True
        )
        stack.enter_context(pool)
        yield
