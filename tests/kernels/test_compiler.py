"""Compiled models launch their kernels from C++, where Inductor can do that."""

import pytest
import torch
from torch._inductor import compile_fx, utils
from torch._inductor.exc import InductorError
from vllm.config import CompilationConfig, CompilationMode

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
    ("backend", "mode", "options", "objects", "expected"),
    [
        ("inductor", ONCE, {}, False, OURS),
        ("inductor", ONCE, {}, True, "inductor"),
        ("inductor", ONCE, {"cpp_wrapper": False}, False, "inductor"),
        ("eager", ONCE, {}, False, "eager"),
        ("inductor", CompilationMode.NONE, {}, False, "inductor"),
    ],
)
def test_it_compiles_what_inductor_would_where_names_are_strings(
    monkeypatch, backend, mode, options, objects, expected
):
    monkeypatch.setattr(compiler, "_USE_LAYERNAME", objects)
    compilation = CompilationConfig(
        backend=backend, mode=mode, inductor_compile_config=options
    )
    compiler.launch_from_cpp(compilation)
    assert compilation.backend == expected


def test_kernels_are_launched_from_cpp(monkeypatch):
    monkeypatch.setattr(compiler, "_options", {"size_asserts": False})
    code = compiled()
    assert "CppWrapperCodeCache" in code


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
