"""How sources are loaded, and what the rows of a target step are padded to."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import CUDAGraphMode, LoadConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.offloader import NoopOffloader, get_offloader, set_offloader

from vllm_specinfer import loading
from vllm_specinfer.kernels.cpu import linear
from vllm_specinfer.loading import row_sizes
from vllm_specinfer.options import BestFirstTree, SSMSource
from vllm_specinfer.scheduling.budget import Budget

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config(mode=CUDAGraphMode.NONE, sizes=None):
    """An engine's config, with 3 requests of 8 nodes at most."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode, cudagraph_capture_sizes=sizes
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=8),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
        cache_config=SimpleNamespace(sliding_window=64),
    )


def test_an_ssm_may_be_beside_graphs_of_the_targets_encoder(monkeypatch):
    seen = []

    def replaced(config, **changes):
        seen.append(getattr(config, "compilation_config", None))
        return seen[-1] and seen[-1].cudagraph_mm_encoder

    monkeypatch.setattr(loading, "replace", replaced)
    compilation = SimpleNamespace(cudagraph_mm_encoder=True)
    engine = SimpleNamespace(
        compilation_config=compilation,
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=SimpleNamespace(draft_parallel_config=None),
        parallel_config=SimpleNamespace(rank=0),
    )
    assert loading._config_of(engine, None) is False  # else vLLM refuses the SSM
    assert seen[-1] is compilation and compilation.cudagraph_mm_encoder


def model_config(window=None, layer_types=None):
    return SimpleNamespace(
        hf_text_config=SimpleNamespace(layer_types=layer_types),
        get_sliding_window=lambda: window,
    )


def test_cuda_graphs_pad_to_the_sizes_that_were_captured():
    captured = config(CUDAGraphMode.FULL_AND_PIECEWISE, [8, 1, 4, 2])
    assert row_sizes(captured, nn.Module(), CUDA) == [1, 2, 4, 8]
    assert row_sizes(config(CUDAGraphMode.NONE, [1, 2]), nn.Module(), CUDA) == []
    assert row_sizes(config(CUDAGraphMode.PIECEWISE), nn.Module(), CUDA) == []


def test_on_a_cpu_the_kernels_of_linear_layers_pad(monkeypatch):
    target = nn.Linear(32, 8)
    assert row_sizes(config(), target, CPU) == []
    monkeypatch.setattr(linear, "row_sizes", lambda model, most: [model, most])
    # Three requests with trees of 9 rows.
    assert row_sizes(config(), target, CPU) == [target, 27]


def test_how_light_an_ssm_is_goes_by_what_all_rows_are_multiplied_by(tmp_path):
    def weights(num_layers):
        embedding = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
        nn.Module.__init__(embedding)
        embedding.weight = nn.Parameter(torch.empty(1000, 8))
        layers = [nn.Linear(8, 16) for _ in range(num_layers)]
        return loading._multiplied_weights(nn.Sequential(embedding, *layers))

    assert weights(3) == 3 * 8 * 16
    assert weights(0) == 1  # something to divide by


@pytest.mark.parametrize(
    ("layer_types", "window"),
    [
        (None, 128),
        (["sliding_attention"], 128),
        # These tell each layer.
        (["sliding_attention", "full_attention"], None),
    ],
)
def test_an_ssm_has_its_own_window(layer_types, window):
    made = config()
    with loading._own_window_of(model_config(128, layer_types), made):
        assert made.cache_config.sliding_window == window
    assert made.cache_config.sliding_window == 64


@pytest.mark.parametrize(
    "load_format", ["auto", "safetensors", "runai_streamer", "fastsafetensors", "own"]
)
def test_an_ssm_is_loaded_as_the_target_is(load_format):
    target = LoadConfig(load_format=load_format)
    assert loading._load_config_of(target) is target


@pytest.mark.parametrize("load_format", ["dummy", "sharded_state", "tensorizer"])
def test_an_ssms_folder_is_read_where_the_targets_is_not(load_format):
    target = LoadConfig(
        load_format=load_format,
        download_dir="somewhere",
        safetensors_load_strategy="eager",
        ignore_patterns=["*.bin"],
        model_loader_extra_config={"pattern": "part-{rank}"},
    )
    found = loading._load_config_of(target)
    # The default loader refuses what it has no use for.
    assert (found.load_format, found.model_loader_extra_config) == ("auto", {})
    assert found.download_dir == target.download_dir
    assert found.safetensors_load_strategy == target.safetensors_load_strategy
    assert found.ignore_patterns == target.ignore_patterns


@pytest.mark.parametrize("fails", [False, True])
def test_ssms_stay_on_the_device_whatever_of_the_target_does_not(monkeypatch, fails):
    class Offloader(NoopOffloader):
        """Keeps the target's weights elsewhere."""

    def load(*_):
        seen.append(type(get_offloader()))
        if fails:
            raise OSError
        return SimpleNamespace()

    offloader, seen, made = Offloader(), [], config()
    made.speculative_config = SimpleNamespace(
        ssm_model_configs=[model_config()],
        num_speculative_tokens=8,
        options=SimpleNamespace(
            sources=[SSMSource("an SSM")],
            tree=BestFirstTree(4, 4),
            verification_rule="coupled",
        ),
    )
    monkeypatch.setattr(loading, "_load", load)
    set_offloader(offloader)
    try:
        with pytest.raises(OSError) if fails else contextlib.nullcontext():
            loading.load_sources(made, nn.Module(), CPU, Budget())
        assert seen == [NoopOffloader] and get_offloader() is offloader
    finally:
        set_offloader(None)
