"""CUDA graphs on a CPU: what is launched is recorded, and a replay launches it again.

In the place of `torch.cuda.CUDAGraph` and `torch.cuda.graph`. As on a GPU, a replay
knows where the tensors of the capture lie and what was launched over them, and nothing
that the host has learned since; what would wait for the device cannot be captured, and
memory from before the capture must still be somebody's.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._C._distributed_c10d import Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
# Their shapes or results are the host's to know.
WAITS = {
    *(aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2),
    *(aten._local_scalar_dense, aten.is_nonzero, aten.equal),
}
# Nobody reads what they leave.
EMPTY = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided}


class RecordedGraph:
    """In the place of a `torch.cuda.CUDAGraph`.

    Attributes:
        launches: What a replay launches.
        memory: By its address, what was allocated in the capture, the graph's own.
    """

    def __init__(self) -> None:
        self.launches: list[Callable[[], Any]] = []
        self.memory: dict[int, torch.UntypedStorage] = {}
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
        given = {storage._cdata for storage in _memory((args, kwargs))}
        for storage in _memory(outputs):
            if storage._cdata not in given:
                self.graph.memory[storage._cdata] = storage
        if func.overloadpacket not in EMPTY:
            kept, args, kwargs = self._known((outputs, args, kwargs))
            self.graph.launches.append(partial(_again, kept, func, args, kwargs))
        return outputs

    def launch(self, kernel: Callable[..., None], args: tuple, kwargs: dict) -> None:
        """Run and record what is no operator of torch."""
        with _disable_current_modes():
            kernel(*args, **kwargs)
        args, kwargs = self._known((args, kwargs))
        self.graph.launches.append(lambda: kernel(*_there(args), **_there(kwargs)))

    def _known(self, arguments: Any) -> Any:
        """What a graph knows of them: where tensors lie, not that they are needed."""

        def known(value: Any) -> Any:
            outside = torch.is_tensor(value) and (
                value.untyped_storage()._cdata not in self.graph.memory
            )
            return Address(value) if outside else value

        with _disable_current_modes():
            return tree_map(known, arguments)

    def _check(self, func: Any, args: tuple) -> None:
        by_mask = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_)
        if by_mask:
            indices = [i for i in args[1] if i is not None]
            by_mask = any(i.dtype in (torch.bool, torch.uint8) for i in indices)
        counts = func is aten.repeat_interleave.Tensor
        if func.overloadpacket in WAITS or by_mask or counts:
            raise AssertionError(f"{func} cannot be captured: it waits for the device")


class Address:
    """A tensor in memory that is not the graph's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._memory = StorageWeakRef(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        """It, if its memory is still somebody's."""
        memory = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        if memory is None:
            raise AssertionError("a graph's input was freed after the capture")
        return torch.empty(0, dtype=self._dtype).set_(memory, *self._layout)


def _there(arguments: Any) -> Any:
    """With tensors in the place of addresses."""
    return tree_map(lambda a: a.tensor() if isinstance(a, Address) else a, arguments)


def _memory(values: Any) -> list[torch.UntypedStorage]:
    tensors = filter(torch.is_tensor, tree_leaves(values))
    return [tensor.untyped_storage() for tensor in tensors]


def _again(outputs: Any, func: Any, args: tuple, kwargs: dict) -> None:
    outputs, args, kwargs = _there((outputs, args, kwargs))
    found = func(*args, **kwargs)
    for work in tree_leaves(found):
        if isinstance(work, torch.ScriptObject):  # of other ranks, too
            Work.unbox(work).wait()
    for kept, new in zip(tree_leaves(outputs), tree_leaves(found), strict=True):
        # Views, and what was written in place, are there already.
        if torch.is_tensor(kept) and kept.data_ptr() != new.data_ptr():
            kept.copy_(new)


@contextmanager
def recorded() -> Iterator[None]:
    """Graphs are recorded, kernels that Triton interprets among them."""
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.distributed.parallel_state import GroupCoordinator
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
        kernel = partial(run, self, warmup=warmup)
        if recorders and not warmup:
            recorders[0].launch(kernel, args, kwargs)
        else:
            kernel(*args, **kwargs)

    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "CUDAGraph", RecordedGraph),
            (torch.cuda, "graph", graph),
            (InterpretedFunction, "run", launched),
            # An operator of vLLM's would hide from the recorder what it launches.
            (CpuPlatform, "opaque_attention_op", classmethod(lambda cls: False)),
            # It asks for the communicator of a GPU.
            (GroupCoordinator, "graph_capture", lambda self, context: ExitStack()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        pool = mock.patch.object(
            CpuPlatform, "graph_pool_handle", lambda self: (0, 0), create=True
        )
        stack.enter_context(pool)
        yield
