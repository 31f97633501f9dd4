"""Compiled models whose kernels are launched from C++, not from Python.

Inductor launches what it has compiled, hundreds of kernels and operators in a pass,
from Python by default, a good part of a step with few rows. With `cpp_wrapper`
it compiles that, too, which makes the first start longer. It cannot where operators
get the names of their layers as objects (vllm/utils/torch_utils.py: LayerName), which
those of attention layers do not with `compiled_attention.py`.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx
from torch._inductor.exc import InductorError
from vllm import envs
from vllm.config import CompilationConfig, CompilationMode
from vllm.logger import init_logger
from vllm.utils.torch_utils import LayerName

from vllm_specinfer.kernels.cpu import compiled_attention

# Below vLLM's logger: that is the one with a handler.
logger = init_logger(f"vllm.{__name__}")

KEY = "cpp_wrapper"
# Inductor's options, of the engine of this process that started last.
_options: dict[str, Any] = {}


def launch_from_cpp(compilation: CompilationConfig) -> None:
    """Have the models of an engine compiled by `compile_graph`, where Inductor would.

    Args:
        compilation: The engine's, before its models are made; a user who sets
            `cpp_wrapper` in its `inductor_compile_config` has the choice.
    """
    options = compilation.inductor_compile_config
    inductor = compilation.backend == "inductor"
    once = compilation.mode == CompilationMode.DYNAMO_TRACE_ONCE
    # What is compiled ahead of time is to be saved, which this is not.
    ahead = envs.VLLM_USE_AOT_COMPILE
    if inductor and once and not ahead and KEY not in options:
        _options.clear()
        _options.update(options)
        compilation.backend = f"{__name__}.{compile_graph.__name__}"


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any
) -> Callable[..., Any]:
    """A backend of `torch.compile`: Inductor, as vLLM has it, but with `cpp_wrapper`.

    Args:
        graph: Of the model.
        inputs: Of its first call.
    """
    # What Dynamo calls with depends on the graph that it has given.
    graph = _copy(graph)
    layers, kept = compiled_attention.use_operators(graph, inputs)
    inputs = list(compress(inputs, kept))
    again = _copy(graph)
    from_cpp = not any(isinstance(value, LayerName) for value in inputs)
    try:
        model = compile_fx(graph, inputs, config_patches={**_options, KEY: from_cpp})
    except InductorError as error:
        logger.warning("specinfer: kernels are launched from Python: %s", error)
        model = compile_fx(again, inputs, config_patches=_options)
    return compiled_attention.Passes(model, layers, kept) if layers else model


def _copy(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
