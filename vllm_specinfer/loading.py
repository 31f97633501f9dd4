"""From the configuration to loaded sources, with what they have learned before."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import vllm
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import CUDAGraphMode, LoadConfig, ModelConfig, VllmConfig, replace
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.offloader import get_offloader, set_offloader
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

from vllm_specinfer.device import is_host
from vllm_specinfer.draft_heads import eagle_type
from vllm_specinfer.drafting.children import ChildChooser
from vllm_specinfer.drafting.eagle import EagleHead
from vllm_specinfer.drafting.experience import Experience
from vllm_specinfer.drafting.lookup import LookupSource
from vllm_specinfer.drafting.neural import NeuralSource
from vllm_specinfer.drafting.sources import SourceSet, lookup_source
from vllm_specinfer.drafting.ssm import NeuralSSM
from vllm_specinfer.drafting.steps import TreeSteps
from vllm_specinfer.options import SSMSource
from vllm_specinfer.scheduling.budget import Budget
from vllm_specinfer.scheduling.budget_memory import BudgetMemory, file_of
from vllm_specinfer.scheduling.predictor import Predictor, read_predictor

# Where the target's weights come later, from files of vLLM's own or from its daemon: an
# SSM's folder is an ordinary one all the same.
_TARGETS_OWN_FORMATS = (
    *("dummy", "ipc_cache", "tensorizer"),
    *("sharded_state", "runai_streamer_sharded"),
)


def load_sources(
    vllm_config: VllmConfig, target: nn.Module, device: torch.device, budget: Budget
) -> SourceSet:
    """Load what the speculative config names.

    Args:
        vllm_config: The engine's config; its speculative config is ours.
        target: The loaded target; a head shares its embedding and output head.
        device: The worker's device.
        budget: Decides what the sources may spend.
    """
    spec = vllm_config.speculative_config
    options = spec.options
    configs = iter(spec.ssm_model_configs)
    num_nodes = spec.num_speculative_tokens
    max_num_reqs = vllm_config.scheduler_config.max_num_seqs
    steps = _steps_on(device)
    lookups: list[LookupSource] = []
    ssms: list[NeuralSource] = []
    for source in options.sources:
        if not isinstance(source, SSMSource):
            model = vllm_config.model_config
            vocab_size = model.get_vocab_size() if model.is_multimodal_model else None
            lookups.append(lookup_source(source, max_num_reqs, num_nodes, vocab_size))
            continue
        number, config = len(ssms), next(configs)
        with _not_offloaded(), _own_window_of(config, vllm_config):
            ssm = _load(vllm_config, config, device, target, f"ssm{number}")
        ssms.append(
            NeuralSource(
                ssm,
                ChildChooser(options.verification_rule, number, steps.coupled),
                source.tree or options.tree,
                source.num_speculative_tokens or num_nodes,
                budget,
                steps,
            )
        )
    sources = SourceSet(lookups, ssms, options.tree, num_nodes, budget, steps)
    if budget.learns and options.scheduler == "learned":
        _give_predictors(sources, options.scheduler_file)
    return sources


def row_sizes(
    vllm_config: VllmConfig, target: nn.Module, device: torch.device
) -> list[int]:
    """What the rows of a target step are padded to, ascending.

    Args:
        vllm_config: The engine's config.
        target: The loaded target.
        device: The worker's device.
    """
    if is_host(device):
        from vllm_specinfer.kernels.cpu import linear

        nodes = vllm_config.speculative_config.num_speculative_tokens
        most = vllm_config.scheduler_config.max_num_seqs * (nodes + 1)
        return linear.row_sizes(target, most)
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return []
    return sorted(compilation.cudagraph_capture_sizes or [])


def recalled(vllm_config: VllmConfig, experience: Experience) -> BudgetMemory:
    """Start from what an engine like this one has learned."""
    model, spec = vllm_config.model_config, vllm_config.speculative_config
    file = file_of(
        *(vllm.__version__, current_platform.get_device_name()),
        *(torch.get_num_threads(), vllm_config.parallel_config.tensor_parallel_size),
        *(model.model, model.dtype, model.quantization, model.enforce_eager),
        *(vllm_config.cache_config.cache_dtype, repr(vllm_config.offload_config)),
        vllm_config.compilation_config.cudagraph_mode,
        vllm_config.scheduler_config.async_scheduling,
        repr(spec.options),
        experience.learned()["predictors"],
    )
    return BudgetMemory(file, experience)


def _steps_on(device: torch.device) -> TreeSteps:
    if not is_host(device):
        return TreeSteps()
    from vllm_specinfer.kernels.cpu.trees import compiled_steps

    return compiled_steps()


def _give_predictors(sources: SourceSet, file: str | None) -> None:
    """SSMs start from the user's file, lookups from what they believe."""
    for source in sources.all():
        source.predictor = Predictor()
    if file is not None:
        for source in sources.ssms:
            source.predictor = read_predictor(Path(file))


@contextmanager
def _not_offloaded() -> Iterator[None]:
    """What is loaded now stays on the device, whatever of the target does not.

    An SSM is small and runs several times a step, and vLLM's prefetching offloader
    takes one model (vllm/model_executor/offloader/prefetch.py).
    """
    offloader = get_offloader()
    set_offloader(None)
    try:
        yield
    finally:
        set_offloader(offloader)


@contextmanager
def _own_window_of(
    model_config: ModelConfig, vllm_config: VllmConfig
) -> Iterator[None]:
    """Layers that are built get this model's sliding window, not the target's.

    As in vLLM (vllm/engine/arg_utils.py), for models all of whose layers have one.
    """
    cache_config = vllm_config.cache_config
    of_target = cache_config.sliding_window
    kinds = getattr(model_config.hf_text_config, "layer_types", None) or ()
    every = all(kind == "sliding_attention" for kind in kinds)
    cache_config.sliding_window = model_config.get_sliding_window() if every else None
    try:
        yield
    finally:
        cache_config.sliding_window = of_target


def _load_config_of(target: LoadConfig) -> LoadConfig:
    """How SSMs and heads are loaded: as the target, where that reads its folder."""
    if target.load_format not in _TARGETS_OWN_FORMATS:
        return target
    return replace(target, load_format="auto", model_loader_extra_config={})


def _config_of(vllm_config: VllmConfig, model_config: ModelConfig) -> VllmConfig:
    """The config that an SSM's passes run under."""
    parallel_config = replace(
        vllm_config.speculative_config.draft_parallel_config,
        rank=vllm_config.parallel_config.rank,
    )
    # Graphs of the target's encoder would be refused for a model that reads ids alone.
    compilation = vllm_config.compilation_config
    encoder_graphs = compilation.cudagraph_mm_encoder
    compilation.cudagraph_mm_encoder = False
    try:
        return replace(
            vllm_config,
            model_config=model_config,
            load_config=_load_config_of(vllm_config.load_config),
            quant_config=None,
            parallel_config=parallel_config,
        )
    finally:
        compilation.cudagraph_mm_encoder = encoder_graphs


def _multiplied_weights(model: nn.Module) -> int:
    """What every row is multiplied by; of prompts only the last goes into the head."""
    found = sum(
        weight.numel()
        for module in model.modules()
        if not isinstance(module, VocabParallelEmbedding)
        for weight in module.parameters(recurse=False)
        if weight.dim() > 1
    )
    return max(found, 1)


def _load(
    vllm_config: VllmConfig,
    model_config: ModelConfig,
    device: torch.device,
    target: nn.Module,
    name: str,
) -> NeuralSSM:
    """An SSM or a head, and which layers came with it."""
    layers = vllm_config.compilation_config.static_forward_context
    before = set(layers)
    config = _config_of(vllm_config, model_config)
    if eagle_type(model_config) is None:
        with set_model_tag(name):
            model = get_model(vllm_config=config, prefix=name)
        ssm = NeuralSSM(model, config, set(layers) - before, device)
        lighter = _multiplied_weights(target) / _multiplied_weights(model)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        ssm.rows_per_step = int(most * max(lighter, 1))
        return ssm
    vllm_config.speculative_config.draft_load_config = config.load_config
    model = load_eagle_model(target, vllm_config)
    width = vllm_config.model_config.get_hidden_size()
    if vllm_config.speculative_config.reads_layers:
        width = model.model.fc.input_size
    return EagleHead(model, config, set(layers) - before, device, width)
