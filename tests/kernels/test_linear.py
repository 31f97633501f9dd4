"""Linear layers on a CPU: products, what is left to vLLM, and who gets them."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from vllm.config import vllm as vllm_config
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from vllm_specinfer.config import SpecInferConfig
from vllm_specinfer.hooks import cpu_linear
from vllm_specinfer.kernels.cpu import huge_pages
from vllm_specinfer.kernels.cpu import linear as cpu_kernels
from vllm_specinfer.kernels.cpu.linear import (
    DTYPES,
    drop_copies,
    kernel_for,
    row_sizes,
    take_over,
)

# Outputs that leave a part of a strip, fewer than one, and one thread without work.
SHAPES = [(64, 32), (70, 48), (3, 16), (1, 576), (33, 2), (962, 576), (576, 1536)]
# Types that a float32 model's weights may have been published in.
HALF = (torch.bfloat16, torch.float16)
STRIP = 32 if torch.cpu._is_avx512_supported() else 16

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx2_supported(), reason="vLLM multiplies there"
)


@pytest.fixture(autouse=True, params=[False, True], ids=["rows", "tiles"])
def tiles(request, monkeypatch):
    """As on a CPU without AMX and, where it has that, with it."""
    if request.param and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU multiplies no tiles")
    case = getattr(request.node, "callspec", None)
    if request.param and case and case.params.get("dtype") is torch.float16:
        pytest.skip("oneDNN multiplies float16 there")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: request.param)
    return request.param


def linear_for(weight):
    """A function of x and bias, and of weights that it does not look at."""
    kernel = kernel_for(weight)
    return lambda x, _, bias=None: kernel.linear(x, kernel.weight, bias)


def in_strips(outputs):
    """So many, and those of zeros behind the last one."""
    return (outputs + STRIP - 1) // STRIP * STRIP


def random(*shape, dtype, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "published"),
    [(d, d) for d in DTYPES] + [(torch.float32, d) for d in HALF],
)
def test_every_row_is_multiplied_by_every_output(tiles, dtype, published, shape, bias):
    weight = random(*shape, dtype=published, seed=1).to(dtype)
    if tiles and dtype is torch.bfloat16 and shape[1] % 32:
        assert kernel_for(weight) is None
        return
    offsets = random(shape[0], dtype=dtype, seed=2) if bias else None
    multiply = linear_for(weight)
    # Up to 12 rows in a tile, 6 of AVX2, or two of 6 at once; of AMX, 16.
    for rows in [*range(1, 66), 100, 130, 560]:
        x = random(rows, shape[1], dtype=dtype)
        exact = x.double() @ weight.double().T + (offsets.double() if bias else 0)
        found = multiply(x, weight, offsets)
        assert found.dtype == dtype
        # Rounded once, after sums in float32.
        scale = x.double().abs() @ weight.double().abs().T
        error = (found.double() - exact).abs()
        unit = torch.finfo(dtype).eps
        assert (error <= unit * exact.abs() + 4e-7 * scale).all()


def test_more_outputs_than_a_cache_holds():
    weight, x = (random(n, 32, dtype=torch.bfloat16) for n in (1024, 2100))
    found = linear_for(weight)(x, weight)
    torch.testing.assert_close(found, linear(x, weight))


def test_more_dimensions_and_rows_that_do_not_lie_side_by_side():
    weight = random(40, 32, dtype=torch.float32)
    x = random(2, 3, 64, dtype=torch.float32)[..., ::2]
    found = linear_for(weight)(x, weight)
    torch.testing.assert_close(found, linear(x, weight))
    assert linear_for(weight)(x[:0], weight).shape == (0, 3, 40)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none(dtype, value):
    weight = random(8, 32, dtype=dtype).abs()
    x = random(2, 32, dtype=dtype)
    x[1, 5] = value
    found = linear_for(weight)(x, weight)
    assert found[0].isfinite().all()
    torch.testing.assert_close(
        found[1], torch.full([8], value, dtype=dtype), equal_nan=True
    )


def test_a_compiled_model_multiplies_any_number_of_rows():
    weight = random(48, 32, dtype=torch.float32)
    multiply = linear_for(weight)
    compiled = torch.compile(
        lambda x: multiply(x, weight).relu(), fullgraph=True, dynamic=True
    )
    for rows in (2, 7, 65):
        x = random(rows, 32, dtype=torch.float32)
        torch.testing.assert_close(compiled(x), linear(x, weight).relu())


@pytest.mark.parametrize("published", [torch.float32, *HALF])
def test_float32_weights_take_no_more_bytes_than_they_need(published):
    weight = random(70, 48, dtype=published).float()
    kernel = kernel_for(weight)
    assert kernel.weight.dtype == torch.float32
    assert kernel.weight.nbytes == in_strips(70) * 48 * published.itemsize
    x = random(9, 48, dtype=torch.float32)
    found = kernel.linear(x, kernel.weight, None)
    # As with one weight that needs all bits, but for what that one brings.
    weight[69, 0] += 1e-6 * weight[69, 0].abs()
    full = kernel_for(weight)
    assert full.weight.nbytes == in_strips(70) * 48 * 4
    assert torch.equal(found[:, :69], full.linear(x, full.weight, None)[:, :69])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_those_beside_it(dtype):
    weight, x = (random(n, 64, dtype=dtype, seed=n) for n in (200, 700))
    multiply = linear_for(weight)
    found = multiply(x, weight)
    for first, rows in [(0, 1), (3, 5), (7, 9), (90, 12), (100, 40)]:
        part = multiply(x[first : first + rows], weight)
        assert torch.equal(part, found[first : first + rows])


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(8, 32, dtype=torch.float64),
        torch.zeros(8, 41),
        torch.zeros(32, 8).T,
        torch.zeros(2, 8, 32),
        torch.zeros(8, 32, device="meta"),
    ],
)
def test_other_weights_are_left_to_vllm(weight):
    assert kernel_for(weight) is None


def test_float16_is_onednns_where_the_cpu_has_amx(monkeypatch):
    weight = torch.zeros(8, 32, dtype=torch.float16)
    for amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        assert (kernel_for(weight) is None) == amx


def test_without_a_compiler_weights_are_left_to_vllm(monkeypatch):
    assert kernel_for(torch.zeros(8, 32)) is not None
    monkeypatch.setattr(cpu_kernels.extension, "load", lambda: None)
    assert kernel_for(torch.zeros(8, 32)) is None


def test_tiles_are_whole_along_their_inputs(tiles, monkeypatch):
    weight = torch.zeros(8, 48, dtype=torch.bfloat16)
    assert (kernel_for(weight) is None) == tiles
    # A compiler that does not know them.
    kernels = SimpleNamespace(tile_rows=0, strip=STRIP)
    monkeypatch.setattr(cpu_kernels.extension, "load", lambda: kernels)
    assert (kernel_for(weight[:, :32].contiguous()) is None) == tiles


@pytest.mark.parametrize("remove", [True, False])
def test_a_layer_is_taken_over_with_its_weight_or_without(tiles, remove):
    layer = nn.Linear(32, 40, bias=False).bfloat16().requires_grad_(False)
    weight = layer.weight.clone()
    assert take_over(layer, remove) is not None
    assert layer.weight.numel() == (in_strips(40) if remove else 40) * 32
    assert remove or torch.equal(layer.weight, weight)
    x = random(3, 32, dtype=torch.bfloat16)
    found = layer.cpu_linear(x, layer.weight, None)
    torch.testing.assert_close(found, linear(x, weight))
    if remove:  # the head is not asked what its rows cost
        model = nn.Sequential(layer)
        assert row_sizes(model, 40) == ([16, 32, 48] if tiles else [])


@pytest.mark.parametrize("first", [*DTYPES, None])
@pytest.mark.parametrize("then", DTYPES)
def test_what_was_compiled_multiplies_by_any_new_weights(first, then):
    """Those before may have been all zeros; they take no more bytes than they can."""
    layer = nn.Linear(32, 40, bias=False).requires_grad_(False)
    layer.weight.zero_()
    if first is not None:
        layer.weight.copy_(random(40, 32, dtype=first))
    take_over(layer, True)
    multiply, size = layer.cpu_linear, layer.weight.nbytes
    for dtype in (then, torch.bfloat16):
        weight = random(40, 32, dtype=dtype, seed=1).float()
        layer.weight = nn.Parameter(weight, requires_grad=False)
        take_over(layer, True)
        x = random(3, 32, dtype=torch.float32)
        for found in (multiply, layer.cpu_linear):
            torch.testing.assert_close(found(x, layer.weight, None), linear(x, weight))
        if dtype is (first or torch.bfloat16):
            assert layer.weight.nbytes == size


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_weights_take_no_more_huge_pages(monkeypatch, dtype):
    """They are copied to where those before are, whose pages they would outlive."""
    layer = nn.Linear(32, 40, bias=False).to(dtype).requires_grad_(False)
    take_over(layer, True)
    weight, x = random(40, 32, dtype=dtype, seed=1), random(3, 32, dtype=dtype)
    expected = linear_for(weight)(x, weight)
    monkeypatch.setattr(huge_pages, "empty", None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    take_over(layer, True)
    assert torch.equal(layer.cpu_linear(x, layer.weight, None), expected)


def test_a_head_has_the_new_weights_of_its_embedding():
    head = nn.Linear(32, 40, bias=False).requires_grad_(False)
    take_over(head, False)
    x = random(3, 32, dtype=torch.float32)
    for seed in range(2):
        head.weight.copy_(random(40, 32, dtype=torch.float32, seed=seed))
        drop_copies(nn.Sequential(head))
        found = head.cpu_linear(x, head.weight, None)
        torch.testing.assert_close(found, linear(x, head.weight))


def test_an_embedding_by_which_nothing_multiplies_is_not_copied(monkeypatch):
    """Nor is a head twice."""
    layer = nn.Linear(32, 40, bias=False).requires_grad_(False)
    copies = mock.Mock(side_effect=huge_pages.empty)
    monkeypatch.setattr(huge_pages, "empty", copies)
    take_over(layer, False)
    assert not copies.called
    for _ in range(2):
        layer.cpu_linear(random(3, 32, dtype=torch.float32), layer.weight, None)
    copies.assert_called_once()


def test_kernels_of_new_weights_are_not_noted_again(monkeypatch):
    """What vLLM copies them to has as many bytes as they need."""
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", _stock())
    cpu_linear.install()
    method = SpecInferConfig.__new__(SpecInferConfig)
    method.linear_kernels = []
    current = SimpleNamespace(speculative_config=method)
    monkeypatch.setattr(vllm_config, "_current_vllm_config", current)
    layer = nn.Linear(32, 8, bias=False).requires_grad_(False)
    for dtype in (torch.bfloat16, torch.float32):
        weight = random(8, 32, dtype=dtype).float()
        layer.weight = nn.Parameter(weight, requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        info = get_layerwise_info(layer)
        info.kernel_tensors = info.kernel_tensors or ({"weight": layer.weight}, {})
    before = info.kernel_tensors[0]["weight"]
    assert before is not layer.weight
    assert before.shape == layer.weight.shape
    assert before.nbytes == in_strips(8) * 32 * 4
    assert len(method.linear_kernels) == 1


@pytest.mark.parametrize("ours", [True, False])
def test_only_engines_of_this_method_multiply_so(monkeypatch, ours):
    # Undone after the test.
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", _stock())
    cpu_linear.install()
    method = SpecInferConfig.__new__(SpecInferConfig) if ours else None
    if ours:
        method.linear_kernels = []
    current = SimpleNamespace(speculative_config=method)
    monkeypatch.setattr(vllm_config, "_current_vllm_config", current)
    layer = nn.Linear(32, 8, bias=False)
    weight = layer.weight.detach().clone()
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    # vLLM keeps its own arrangement of the weights elsewhere.
    assert layer.weight.numel() == (in_strips(8) * 32 if ours else 0)
    if ours:  # models are compiled with what multiplies
        (noted,) = method.linear_kernels
        assert "outputs=8" in noted and "torch.float32" in noted
    x = torch.randn(3, 32)
    found = layer.cpu_linear(x, layer.weight, None)
    torch.testing.assert_close(found, linear(x, weight))


def _stock():
    found = utils.dispatch_cpu_unquantized_gemm
    return getattr(found, "_specinfer_original", found)
