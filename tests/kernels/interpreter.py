"""Triton's interpreter, for kernels that a machine without a GPU is to run."""

import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

# Of all modules: importing vLLM takes longer than most of their kernels.
_process: list[ProcessPoolExecutor] = []


def outputs_of(cases: ModuleType, folder: Path) -> Any:
    """What a module's `outputs()` gives under the interpreter, by way of a file."""
    if not _process:
        context = multiprocessing.get_context("spawn")
        _process.append(ProcessPoolExecutor(1, context, _begin))
    output = folder / "outputs.pt"
    _process[0].submit(_save, cases.__name__, output).result()
    return torch.load(output)


def _begin() -> None:
    os.environ.update(TRITON_INTERPRET="1", VLLM_PLUGINS="")
    prepare()


def _save(cases: str, output: Path) -> None:
    torch.save(importlib.import_module(cases).outputs(), output)


def prepare() -> None:
    """Make vLLM believe in Triton; the process must run under TRITON_INTERPRET=1."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    let_vllm_use_triton()
    _mend()
    # What nobody has written may hold anything: NaN and the highest integers.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def let_vllm_use_triton() -> None:
    """Its kernels are functions of Triton's from now on, as they are on a GPU."""
    from triton.backends import backends

    # vLLM looks for a Triton CPU backend by this name, to import itself only.
    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver)
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON


def _mend() -> None:
    """Let Triton's interpreter run what it stumbles over."""
    import triton.runtime.interpreter as interpreter
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.metrics import logits

    tl, builder_cls = interpreter.tl, interpreter.InterpreterBuilder
    topk_topp_sampler.HAS_TRITON = False  # that kernel
    # It replaces the language in every call of every function; once is enough.
    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_attr = partial(_name_semantic, interpreter)
    interpreter._patch_lang(language)
    replaced = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: replaced
    # It copies arguments to the host and back, where all of them are.
    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda *_: None
    # It looks for overflows, which takes a third of the time, but asserts nothing.
    options = interpreter.interpreter_builder.options
    assert options.sanitize_overflow and not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    # It makes a table of all types whenever it looks for one.
    dtype_of, dtypes = interpreter._get_np_dtype, {}

    def known_dtype(kind: Any) -> np.dtype:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(kind)
        return dtypes[name]

    interpreter._get_np_dtype = known_dtype
    _share_shapes(tl, interpreter.TritonSemantic)
    builder = interpreter._interpreter
    store = builder.store
    # The conjunction of a scalar and a tensor mask comes out as int32.
    builder.store = lambda ptr, value, mask: store(
        ptr, value, np.asarray(mask).astype(np.bool_)
    )
    # Programs of a launch have no order on a GPU: they run from the last to the first.
    set_grid_idx = builder_cls.set_grid_idx

    def set_mirrored(self: Any, *place: int) -> None:
        mirrored = np.subtract(self.grid_dim, place) - 1
        set_grid_idx(self, *mirrored.tolist())

    builder_cls.set_grid_idx = set_mirrored
    # A bfloat16 is stored as an integer, and dots would multiply those.
    dot = builder_cls.create_dot

    def create_dot(self: Any, *operands: Any) -> Any:
        widened = [
            self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in operands[:2]
        ]
        return dot(self, *widened, *operands[2:])

    builder_cls.create_dot = create_dot
    # libdevice is a CUDA library.
    logits.libdevice = SimpleNamespace(isnan=lambda x: x != x)


def _name_semantic(
    interpreter: ModuleType,
    owner: Any,
    name: str,
    member: Any,
    builder: Any,
    scope: Any,
) -> None:
    """As Triton's `_patch_attr`, which makes two copies of the names of a call."""
    function = getattr(member, "__wrapped__", member)
    semantic = interpreter.TritonSemantic(builder)

    def named(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, named)


def _share_shapes(tl: ModuleType, semantic: type) -> None:
    """Checks, wraps and compares a shape once, where Triton does it for every value of
    a kernel: a good part of the time that it takes to interpret one."""
    of_type, of_tensor = tl.block_type.__init__, tl.tensor.__init__
    broadcast = semantic.broadcast_impl_value
    types, tensors, shapes, sizes_of = {}, {}, {}, {}

    def begin_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = sizes_of.get(id(shape))
        if sizes is None:
            sizes = tuple([getattr(size, "value", size) for size in shape])
        key = element_ty.name, sizes
        if key not in types:
            of_type(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            sizes_of[id(self.shape)] = sizes
            types[key] = vars(self)
        vars(self).update(types[key], element_ty=element_ty)

    def begin_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            of_tensor(self, handle, type)
            tensors[type.name] = {"shape": self.shape, "numel": self.numel}
        known = tensors[type.name]
        vars(self).update(known, handle=handle, type=type, dtype=type.scalar)

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        shape, other = (getattr(x.type, "shape", None) for x in (lhs, rhs))
        return (lhs, rhs) if shape is other else broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__ = begin_type, begin_tensor
    semantic.broadcast_impl_value = broadcast_others
