"""Compiled models launch their kernels from C++, where Inductor can do that."""

import pytest
import torch
from torch._inductor import compile_fx, utils
from torch._inductor.exc import InductorError
from vllm.config import CompilationConfig, CompilationMode
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

from vllm_specinfer.kernels.cpu import compiler

ONCE = CompilationMode.DYNAMO_TRACE_ONCE
OURS = f"{compiler.__name__}.compile_graph"


def half(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ x.T, dim=-1).relu() / 2


def compiled() -> str:
    """What is compiled for `half`, which must give what it gives."""
    torch._dynamo.reset()
    function = torch.compile(half, backend=compiler.compile_graph, fullgraph=True)
    x = torch.linspace(0, 1, 12).reshape(3, 4)
    with torch.inference_mode():
        found, code = utils.run_and_get_code(function, x)
        assert torch.allclose(found, half(x))
    return "".join(code)


@pytest.mark.parametrize(
    ("backend", "mode", "ahead", "options", "expected"),
    [
        ("inductor", ONCE, "0", {}, OURS),
        ("inductor", ONCE, "0", {"cpp_wrapper": False}, "inductor"),
        ("inductor", ONCE, "1", {}, "inductor"),
        ("eager", ONCE, "0", {}, "eager"),
        ("inductor", CompilationMode.NONE, "0", {}, "inductor"),
    ],
)
def test_it_compiles_what_inductor_would(
    backend, mode, ahead, options, expected, monkeypatch
):
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", ahead)
    compilation = CompilationConfig(
        backend=backend, mode=mode, inductor_compile_config=options
    )
    compiler.launch_from_cpp(compilation)
    assert compilation.backend == expected


def test_an_engine_has_its_own_options(monkeypatch):
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    for options in ({"max_autotune": True}, {"size_asserts": False}):
        compilation = CompilationConfig(
            backend="inductor", mode=ONCE, inductor_compile_config=options
        )
        compiler.launch_from_cpp(compilation)
    assert compiler._options == compilation.inductor_compile_config
    assert "max_autotune" not in compiler._options


def test_kernels_are_launched_from_cpp(monkeypatch):
    monkeypatch.setattr(compiler, "_options", {"size_asserts": False})
    code = compiled()
    assert "CppWrapperCodeCache" in code


def test_an_object_for_a_name_has_them_launched_from_python():
    def named(x: torch.Tensor, name: LayerNameType) -> torch.Tensor:
        return x + len(_resolve_layer_name(name))

    direct_register_custom_op(
        "specinfer_test_named", named, fake_impl=lambda x, name: torch.empty_like(x)
    )

    def model(x):
        return torch.ops.vllm.specinfer_test_named(x * 2, _encode_layer_name("four"))

    function = torch.compile(model, backend=compiler.compile_graph, fullgraph=True)
    with torch.inference_mode():
        found, code = utils.run_and_get_code(function, torch.ones(3))
    assert found.tolist() == [6, 6, 6]
    assert "CppWrapperCodeCache" not in "".join(code)


def test_what_cannot_be_launched_from_cpp_is_launched_from_python(monkeypatch):
    of_inductor, options = compile_fx.compile_fx, []

    def compile_graph(graph, *args, config_patches):
        options.append(config_patches)
        if config_patches.get("cpp_wrapper"):
            # As far as it came, it has changed the graph.
            graph.graph.erase_node(next(iter(reversed(graph.graph.nodes))))
            raise InductorError(NotImplementedError("an object"), None)
        return of_inductor(graph, *args, config_patches=config_patches)

    monkeypatch.setattr(compiler, "compile_fx", compile_graph)
    monkeypatch.setattr(compiler, "_options", {"size_asserts": False})
    code = compiled()
    assert options == [{"size_asserts": False, "cpp_wrapper": True}, compiler._options]
    assert "CppWrapperCodeCache" not in code
