"""Attention layers of compiled models, run from C++ where a pass has only trees.

vLLM's two operators of a layer, which write K and V and attend, are Python: each looks
up the pass and calls the layer's implementation. Compiled models call operators of
`layers_bindings.cpp` instead, which are told of a pass as it begins. They call vLLM's
for what `CPUTreeAttentionImpl` would not run on our kernels alone.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import compress
from typing import Any

import torch
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.utils.torch_utils import LayerName, _resolve_layer_name

from vllm_specinfer.attention.cpu import CPUTreeAttentionImpl
from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.kernels.cpu.cache_write import MOST_ROWS
from vllm_specinfer.kernels.cpu.page_layout import page_layout

Model = Callable[..., Any]

# Operators live as long as it does.
_library = torch.library.Library("vllm_specinfer", "FRAGMENT")
# vLLM's operators, and their arguments that `layers_bindings.cpp` knows, the name last.
_ARGUMENTS = {
    "unified_kv_cache_update": ["key", "value", "layer_name"],
    "unified_attention_with_output": ["query", "key", "value", "output", "layer_name"],
}


def use_operators(
    graph: torch.fx.GraphModule, inputs: Sequence[Any]
) -> tuple[list[str], list[bool]]:
    """Put our operators in the place of vLLM's.

    vLLM's get the names of layers as strings or as `LayerName`s, which are inputs of
    the graph; ours have strings.

    Args:
        graph: Of a model; changed.
        inputs: Of its first call.

    Returns:
        The names of its layers, and of each input whether it is still one.
    """
    nodes = graph.graph.nodes
    given = dict(zip((n for n in nodes if n.op == "placeholder"), inputs, strict=True))
    names: dict[str, None] = {}
    for node in nodes:
        if node.op == "call_function" and node.target in _operators():
            node.target, at = _operators()[node.target]
            name = _resolve_layer_name(given.get(node.args[at], node.args[at]))
            node.update_arg(at, name)
            names[name] = None
    if not names:
        return [], [True] * len(inputs)
    unused = [isinstance(v, LayerName) and not n.users for n, v in given.items()]
    for node in compress(given, unused):
        graph.graph.erase_node(node)
    graph.recompile()
    return list(names), [not name for name in unused]


@cache
def _operators() -> dict[Any, tuple[Any, int]]:
    """For vLLM's operators, ours and where their names are.

    None without the C++ kernels, or where vLLM's have other arguments than those that
    `layers_bindings.cpp` knows.
    """
    if extension.load() is None:
        return {}
    theirs = {name: getattr(torch.ops.vllm, name) for name in _ARGUMENTS}
    for name, known in _ARGUMENTS.items():
        arguments = theirs[name].default._schema.arguments
        if [argument.name for argument in arguments[: len(known)]] != known:
            return {}
    operators = {}
    for name, known in _ARGUMENTS.items():
        schema = theirs[name].default._schema
        kind = schema.arguments[len(known) - 1].type
        _library.define(
            str(schema)
            .removeprefix("vllm::")
            .replace(f"{kind} {known[-1]}", f"str {known[-1]}")
        )
        ours = getattr(torch.ops.vllm_specinfer, name).default, len(known) - 1
        operators |= {theirs[name]: ours, theirs[name].default: ours}
    # What attends returns nothing.
    _library._register_fake("unified_kv_cache_update", lambda key, *_: key.new_empty(0))
    return operators


class Passes:
    """A compiled model, whose operators are told of each of its passes.

    Compiled code outlives its engine, so that nothing of a pass is kept after it.
    """

    def __init__(self, model: Model, names: list[str], kept: list[bool]) -> None:
        """Nothing is known of the layers yet.

        Args:
            model: What has been compiled, of a graph with our operators.
            names: Of its layers.
            kept: Of each argument whether it is the model's.
        """
        kernels = extension.load()
        assert kernels is not None, "our operators are part of it"
        self._kernels = kernels
        self._model = model
        self._kept = kept
        self._layers = kernels.Layers(names)
        self._names = names
        # What C++ has to know of a layer with such scales of K and V, which new weights
        # may change; none where it cannot run it.
        self._constants: dict[tuple[str, float, float], Any] = {}

    def __call__(self, *args: Any) -> Any:
        """One pass, as vLLM has set its context."""
        try:
            self._layers.begin(self._passes(get_forward_context()))
            return self._model(*compress(args, self._kept))
        except RuntimeError:
            # What launches kernels from C++ makes one of any exception.
            if raised := self._layers.raised():
                raise raised from None
            raise
        finally:
            self._layers.end()

    def _passes(self, context: ForwardContext) -> list[Any]:
        if not isinstance(context.attn_metadata, dict):
            return []
        groups: dict[tuple[int, int], Any] = {}
        passes = []
        for name in self._names:
            layer = context.no_compile_layers[name]
            metadata = context.attn_metadata[name]
            slots = context.slot_mapping.get(name)
            group = id(metadata), id(slots)
            if group not in groups:
                groups[group] = self._make_rows(metadata, slots)
            key = name, layer._k_scale_float, layer._v_scale_float
            if key not in self._constants:
                self._constants[key] = self._make_constants(layer)
            rows, constants = groups[group], self._constants[key]
            passes.append(
                (constants, layer.impl.typed(layer.kv_cache), rows)
                if rows and constants
                else None
            )
        return passes

    def _make_constants(self, layer: Any) -> Any:
        impl = layer.impl
        if not isinstance(impl, CPUTreeAttentionImpl):
            return None
        kv_cache = impl.typed(layer.kv_cache)
        layout = page_layout(
            layer.isa, kv_cache.dtype, kv_cache.shape[2], impl.head_size
        )
        if not layout.is_known:
            return None
        return self._kernels.Constants(
            *(impl.scale, impl.logits_soft_cap, impl.sinks),
            *(layer._k_scale_float, layer._v_scale_float),
            *(max(impl.sliding_window, 0), layout.in_tiles),
        )

    def _make_rows(self, metadata: Any, slots: torch.Tensor | None) -> Any:
        tree = getattr(metadata, "tree", None)
        if tree is None or metadata.prompts is not None:
            return None
        return self._kernels.Rows(
            *(metadata.block_table, metadata.query_start_loc, metadata.seq_lens),
            *(tree.is_tree, tree.context_lens, tree.ancestor_bits),
            slots if slots is not None and len(slots) <= MOST_ROWS else None,
        )
