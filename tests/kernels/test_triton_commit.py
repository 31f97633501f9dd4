"""The K/V commit on a GPU, run by Triton's interpreter, against the CPU's."""

from pathlib import Path

import commit_cases as cases
import pytest
import torch
from interpreter import outputs_of
from vllm.platforms import current_platform

from vllm_specinfer.commit.compaction import commit_kv_ref
from vllm_specinfer.kernels.cpu.page_layout import page_layout
from vllm_specinfer.kernels.triton.commit import LayerTable

current_platform.import_kernels()


def committed_on_cpu(
    cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor
) -> torch.Tensor:
    """The CPU's commit of the same tokens, in the CPU's arrangement, read back."""
    block_size, head_size = cache.shape[2], cache.shape[3] // 2
    layout = page_layout("vec", cache.dtype, block_size, head_size)
    items = torch.cat([layout.key, layout.value], dim=1)
    arranged = torch.zeros_like(cache, memory_format=torch.contiguous_format)
    arranged.flatten(2)[:, :, items] = cache
    commit_kv_ref([arranged], src, dst, ["vec"])
    return arranged.flatten(2)[:, :, items]


def test_paths_move_as_on_the_cpu(tmp_path: Path) -> None:
    outputs = outputs_of(cases, tmp_path)
    num_moved = 0
    for seed, found in zip(cases.SEEDS, outputs, strict=True):
        caches, arguments = cases.commit_case(seed)
        src, dst = cases.moved_slots(**arguments)
        num_moved += int((src != dst).sum())
        for cache, of_kernel in zip(caches, found, strict=True):
            if cache.element_size() > 1:
                assert of_kernel.equal(committed_on_cpu(cache, src, dst))
        cases.commit_paths_ref(caches, **arguments)
        for cache, of_kernel in zip(caches, found, strict=True):
            assert of_kernel.view(torch.uint8).equal(
                cache.contiguous().view(torch.uint8)
            )
    assert num_moved > 100


def test_a_table_says_what_caches_it_cannot_describe() -> None:
    cache = torch.zeros(3, 2, 16, 64)
    with pytest.raises(ValueError, match=r"share a block size; got \[16, 32\]"):
        LayerTable.of([cache, torch.zeros(3, 2, 32, 64)])
    with pytest.raises(ValueError, match="consecutive 32-bit words; got shape"):
        LayerTable.of([torch.zeros(3, 2, 64, 16).transpose(2, 3)])
    with pytest.raises(ValueError, match="consecutive 32-bit words; got shape"):
        LayerTable.of([torch.zeros(3, 2, 16, 33, dtype=torch.bfloat16)])
