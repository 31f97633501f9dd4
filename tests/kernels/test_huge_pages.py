"""Memory that weights lie in: asked for in huge pages, and nobody else's."""

import re
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.e2e import engine
from tests.e2e.models import tiny_llama
from vllm_specinfer.kernels.cpu import huge_pages
from vllm_specinfer.kernels.cpu.linear import kernel_for

PAGE = 1 << 21

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this kernel has no huge pages",
)


def flags_of(tensor: torch.Tensor) -> list[str]:
    """The kernel's flags of the memory that a tensor lies in."""
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(number, 16) for number in found.groups())
            inside = first <= tensor.data_ptr() < end
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    return flags


@pytest.fixture(autouse=True)
def _nothing_taken_yet(monkeypatch):
    monkeypatch.setattr(huge_pages, "_free", torch.empty(0, dtype=torch.uint8))


@needs_huge_pages
@pytest.mark.parametrize("count", [100, 40 << 20])
def test_they_are_asked_for(count):
    assert "hg" in flags_of(huge_pages.empty(count, torch.bfloat16))


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="vLLM multiplies there")
def test_weights_of_the_kernels_lie_in_them():
    before = huge_pages.empty(1, torch.int8)
    kernel = kernel_for(torch.randn(64, 32))
    assert kernel.weight.data_ptr() == before.data_ptr() + 64


def test_small_tensors_share_pages_and_no_bytes():
    sizes = [1, 7, 1 << 20, 3, (12 << 20) + 5, 33 << 20, 9 << 20, 20 << 20, 2]
    tensors = [huge_pages.empty(size, torch.float16) for size in sizes]
    for value, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert tensor.shape == (size,) and tensor.dtype == torch.float16
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(value)
    for value, tensor in enumerate(tensors):
        assert (tensor == value).all()
    # As many as fit begin where the one before them ends.
    starts = [tensor.data_ptr() for tensor in tensors]
    assert starts[0] % PAGE == 0 and starts[1] - starts[0] == 64
    assert starts[5] % PAGE == 0


def test_a_tensor_outlives_those_beside_it():
    first, second = (huge_pages.empty(1000, torch.float32) for _ in range(2))
    second.fill_(3)
    del first
    huge_pages.empty(16 << 20, torch.int8).fill_(1)
    assert (second == 3).all()


@needs_huge_pages
@pytest.mark.parametrize("size", [100, 5 * PAGE + 100])
def test_zeros_lie_in_them(size):
    with huge_pages.Zeros():
        zeros = torch.zeros(size, dtype=torch.int8, device="cpu")
        ones = torch.ones(size, dtype=torch.int8)
    assert zeros.dtype == torch.int8 and zeros.shape == (size,)
    assert not zeros.any() and ones.all()
    if size > PAGE:
        assert "hg" in flags_of(zeros[size // 2 :])


@needs_huge_pages
def test_the_kv_cache_of_an_engine_lies_in_them(tmp_path):
    target = tiny_llama(tmp_path / "target", seed=0)
    llm = {
        **engine.tiny(target),
        "enforce_eager": True,
        "speculative_config": {"method": "specinfer", "model": "ngram"},
    }
    flags = processes.call(flags_of_kv_cache, llm)
    assert flags and all("hg" in flags_of_layer for flags_of_layer in flags)


def flags_of_kv_cache(arguments: dict) -> list[list[str]]:
    """Start an engine; the flags amid each layer's K/V."""
    from vllm import LLM

    from vllm_specinfer.evidence.engines import core_of

    llm = LLM(**arguments)
    worker = core_of(llm).model_executor.driver_worker.worker
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    caches = [layer.kv_cache for layer in layers]
    return [flags_of(cache[len(cache) // 2 :]) for cache in caches]


def test_a_kernel_without_huge_pages_gives_ordinary_ones(monkeypatch):
    monkeypatch.setattr(huge_pages.mmap, "MADV_HUGEPAGE", -1)  # no such advice
    assert huge_pages.empty(5, torch.int64).fill_(2).tolist() == [2] * 5
