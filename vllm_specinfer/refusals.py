"""What method specinfer refuses at start-up, each in one sentence.

Every ``*_reason`` returns that sentence, or None where nothing is wrong. The front
end asks them all before it changes anything; the worker asks again through
``check_vllm_config``, because a config need not come from engine arguments.
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

CUDA_ENV = "VLLM_SPECINFER_CUDA"
# The member of vLLM's enum that is kept free for backends from outside.
CUDA_BACKEND = "CUSTOM"

PLAIN_KV_DTYPES = ("auto", "float16", "bfloat16")
FP8_KV_DTYPES = ("fp8", "fp8_e4m3")
CPU_FP8_KV_DTYPES = (*FP8_KV_DTYPES, "fp8_e5m2")

_SLIDING = "sliding_attention"
_CHUNKED = "chunked_attention"


def runner_reason() -> str | None:
    """Why the environment's model runner cannot run trees, or None."""
    from vllm import envs

    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        return (
            "VLLM_USE_V2_MODEL_RUNNER must be 1 or unset, the V1 runner would draft "
            "a chain; got 0"
        )
    return None


def device_reason() -> str | None:
    """Why the platform cannot run trees, or None."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return None
    if not current_platform.is_cuda():
        return (
            "the platform must be a CPU, or CUDA as an experiment, for method "
            f"specinfer; got {current_platform.device_name}"
        )
    value = os.environ.get(CUDA_ENV)
    if value in (None, "", "0"):
        return (
            f"{CUDA_ENV} must be 1 for method specinfer on CUDA, which is an "
            f"experiment and has never been run on a GPU; got {value!r}"
        )
    return None


def tree_attention_reason(choice: str) -> str | None:
    """Why the chosen implementation of tree attention cannot run here, or None."""
    from vllm.platforms import current_platform

    from vllm_specinfer.options import XFORMERS

    if choice != XFORMERS:
        return None
    if current_platform.is_cpu():
        return f"tree_attention must be auto on a CPU; got {choice}"
    try:
        import xformers.ops.tree_attention  # noqa: F401
    except Exception as error:  # built for another torch, it fails as it likes
        return (
            "tree_attention must be auto without a working xformers "
            f"(pip install 'vllm-specinfer[xformers]'); got {choice}, {error!r}"
        )
    return None


def replaced_class_reason(name: str, value: Any, ours: str) -> str | None:
    """Why the user's own class stands in the way of ours, or None."""
    if value in (None, "auto", ours):
        return None
    return _must_be_out(name, "it brings its own", value)


def feature_reason(config: Any) -> str | None:
    """Why a feature that is switched on cannot run with trees, or None.

    Args:
        config: Engine arguments or a ``VllmConfig``: both name these alike.
    """
    for name, why in (
        ("kv_transfer_config", "a connector would save K/V of rejected nodes"),
        ("kv_offloading_size", "a connector would save K/V of rejected nodes"),
        ("watermark_config", "a watermark constrains the sampler"),
        ("diffusion_config", "a diffusion model has no next token"),
    ):
        value = getattr(config, name, None)
        if value is not None:
            return _must_be_out(name, why, value)
    for name, why in (
        ("return_sampling_mask", "masks are not collected along a path"),
        ("enable_trace_replay", "a replayed token ignores the tree"),
    ):
        if value := getattr(config, name, None):
            return _must_be_out(name, why, value)
    return None


def parallel_reason(parallel: "ParallelConfig", model: "ModelConfig") -> str | None:
    """Why a parallel layout cannot run with trees, or None."""
    for name, why in (
        ("pipeline_parallel_size", "only the last stage would draft and commit"),
        ("decode_context_parallel_size", "it shards the slots of a path"),
        ("prefill_context_parallel_size", "it shards the slots of a path"),
    ):
        value = getattr(parallel, name, 1)
        if value != 1:
            return f"{name} must be 1 with method specinfer, {why}; got {value}"
    if parallel.data_parallel_size > 1 and (
        model.is_moe or parallel.enable_expert_parallel
    ):
        return (
            "data_parallel_size must be 1 for a mixture of experts with method "
            "specinfer, ranks would disagree on the number of passes; got "
            f"{parallel.data_parallel_size}"
        )
    if parallel.use_ubatching:
        return _must_be_out(
            "enable_dbo and ubatch_size",
            "a tree's rows must stay in one batch",
            parallel.num_ubatches,
        )
    for name, why in (
        ("enable_eplb", "SSM passes would count as the target's load"),
        ("enable_batch_sharded_sampling", "verification needs a path's rows together"),
    ):
        if getattr(parallel, name, None):
            return _must_be_out(name, why, True)
    return None


def cache_dtype_reason(
    cache_dtype: str, target: "ModelConfig", is_cpu: bool
) -> str | None:
    """Why a resolved KV cache type cannot hold a tree, or None.

    Where the user leaves the type open, vLLM's attention layers take fp8 for a
    ``kv_cache_scheme`` (vllm/model_executor/layers/attention/attention.py).
    """
    by_checkpoint = cache_dtype == "auto" and _has_cache_scheme(target)
    fp8 = _cpu_fp8_kv_dtypes() if is_cpu else FP8_KV_DTYPES
    if (FP8_KV_DTYPES[0] if by_checkpoint else cache_dtype) in PLAIN_KV_DTYPES + fp8:
        return None
    plain = PLAIN_KV_DTYPES[1:] if by_checkpoint else PLAIN_KV_DTYPES
    asked = " and a kv_cache_scheme, which makes it fp8" if by_checkpoint else ""
    return (
        f"kv_cache_dtype must be one of {', '.join(plain + fp8)} on this "
        f"{'CPU' if is_cpu else 'GPU'} with method specinfer; got {cache_dtype!r}"
        f"{asked}"
    )


def _cpu_fp8_kv_dtypes() -> tuple[str, ...]:
    """What vLLM's CPU kernels can read (vllm/v1/attention/backends/cpu_attn.py)."""
    import torch

    return CPU_FP8_KV_DTYPES if torch.cpu._is_avx512_supported() else ()


def _has_cache_scheme(model: "ModelConfig") -> bool:
    quantization = model.model_arch_config.quantization_config or {}
    return bool(quantization.get("kv_cache_scheme"))


def checkpoint_cache_reason(
    cache_dtype: str, target: "ModelConfig", ssms: Iterable["ModelConfig"]
) -> str | None:
    """Why a KV cache type that only an SSM asks for cannot be, or None."""
    if cache_dtype != "auto" or _has_cache_scheme(target):
        return None
    for ssm in ssms:
        if _has_cache_scheme(ssm):
            return (
                "kv_cache_dtype must be set where an SSM has a kv_cache_scheme and "
                "the target has none, as 'auto' makes the SSM's cache alone fp8; got "
                f"'auto' and {ssm.model!r}"
            )
    return None


def model_reason(model: "ModelConfig", role: str) -> str | None:
    """Why a model cannot be a target or an SSM, or None.

    Args:
        model: Its config.
        role: How the sentence names it, "the target" or "the SSM".
    """
    if (kind := _unsupported_kind(model)) is not None:
        return (
            f"{role} must be a causal language model with full attention for method "
            f"specinfer; got {kind} ({', '.join(model.architectures)})"
        )
    return None


def ssm_reason(ssm: "ModelConfig", target: "ModelConfig") -> str | None:
    """Why a model cannot draft for this target, or None."""
    return _fit_reason(ssm, target) or _draft_vocab_reason(ssm)


def _fit_reason(ssm: "ModelConfig", target: "ModelConfig") -> str | None:
    if eagle_type(ssm) is not None:
        return _head_reason(ssm, target)
    if (head := _draft_head(ssm)) is not None:
        return (
            "the SSM must be a language model of its own or an EAGLE head for method "
            f"specinfer; got the draft head {head}"
        )
    if (reason := model_reason(ssm, "the SSM")) is not None:
        return reason
    ours, theirs = ssm.get_vocab_size(), target.get_vocab_size()
    if ours != theirs:
        return (
            f"the SSM's vocab_size must be the target's {theirs}; got {ours} of "
            f"{ssm.model!r}"
        )
    return _tokenizer_reason(ssm, target)


def layer_reason(layers: Iterable[tuple[str, Any]]) -> str | None:
    """Why a built model's attention layers cannot run trees, or None.

    Configs do not always show these; the layers do.

    Args:
        layers: Name and layer pairs, as in
            ``compilation_config.static_forward_context.items()``.
    """
    for name, layer in layers:
        impl = getattr(layer, "impl", None)
        for holder in (layer, impl):
            window = getattr(holder, "sliding_window", None)
            # Backends spell "no window" as None, -1 or (-1, -1).
            if window not in (None, -1, (-1, -1)):
                return _layer_sentence(name, f"sliding window {window}")
            if getattr(holder, "alibi_slopes", None) is not None:
                return _layer_sentence(name, "ALiBi")
            if getattr(holder, "attention_chunk_size", None) is not None:
                return _layer_sentence(name, "chunked-local attention")
            if (kind := getattr(holder, "attn_type", "decoder")) != "decoder":
                return _layer_sentence(name, f"{kind} attention")
        if getattr(layer, "kv_lora_rank", None) is not None:
            return _layer_sentence(name, "MLA")
        if hasattr(layer, "mamba_type"):
            return _layer_sentence(name, "a recurrent state")
    return None


def check_vllm_config(vllm_config: "VllmConfig") -> None:
    """Refuse what the finished config shows; the worker calls it in init_device.

    Args:
        vllm_config: The worker's config.

    Raises:
        ValueError: One sentence that says what must change.
    """
    from vllm.platforms import current_platform

    from vllm_specinfer.compat import REQUIRED_IN_WORKER, unsupported_reason
    from vllm_specinfer.config import SpecInferConfig

    refuse(unsupported_reason(REQUIRED_IN_WORKER))
    spec = vllm_config.speculative_config
    if not isinstance(spec, SpecInferConfig):
        raise ValueError(
            "the speculative config must be a SpecInferConfig for this worker; got "
            f"{type(spec).__name__}"
        )
    refuse(device_reason())
    if not current_platform.is_cpu():
        refuse(_cuda_reason(vllm_config))
    refuse(runner_reason())
    if not vllm_config.use_v2_model_runner:
        raise ValueError(
            "the model runner must be V2 for method specinfer, V1 would draft a "
            "chain; got V1"
        )
    target = vllm_config.model_config
    refuse(feature_reason(vllm_config))
    refuse(parallel_reason(vllm_config.parallel_config, target))
    cache_dtype = vllm_config.cache_config.cache_dtype
    refuse(cache_dtype_reason(cache_dtype, target, current_platform.is_cpu()))
    refuse(model_reason(target, "the target"))
    refuse(checkpoint_cache_reason(cache_dtype, target, spec.ssm_model_configs))
    for ssm in spec.ssm_model_configs:
        if eagle_type(ssm) is None:
            refuse(model_reason(ssm, "the SSM"))
        else:
            refuse(_head_reason(ssm, target))


def refuse(reason: str | None) -> None:
    """Raise a reason, if there is one."""
    if reason is not None:
        raise ValueError(reason)


def _cuda_reason(vllm_config: "VllmConfig") -> str | None:
    backend = vllm_config.attention_config.backend
    if backend is None or backend.name != CUDA_BACKEND:
        return (
            f"the attention backend must be {CUDA_BACKEND} for method specinfer on "
            f"CUDA; got {backend and backend.name}"
        )
    return None


def _must_be_out(name: str, why: str, value: Any) -> str:
    return f"{name} must be left out with method specinfer, {why}; got {value!r}"


def _layer_sentence(name: str, kind: str) -> str:
    return (
        "every attention layer must attend to the whole prefix for method specinfer; "
        f"got {kind} in {name}"
    )


def _unsupported_kind(model: "ModelConfig") -> str | None:
    if (kind := _unsupported_attention(model)) is not None:
        return kind
    if model.registry.is_text_generation_model(model.architectures, model):
        return None
    return "no text generation"


def _unsupported_attention(model: "ModelConfig") -> str | None:
    text_config = model.hf_text_config
    layer_types = getattr(text_config, "layer_types", None) or ()
    window = model.get_sliding_window()
    checks = (
        ("an encoder-decoder", model.is_encoder_decoder),
        ("a pooling model", model.runner_type == "pooling"),
        ("a diffusion model", model.is_diffusion),
        # is_hybrid first: a hybrid also has an inner state.
        ("a hybrid with recurrent layers", model.is_hybrid),
        ("a recurrent state", model.has_inner_state and not model.is_hybrid),
        ("no attention", model.is_attention_free),
        ("MLA", model.use_mla or model.is_deepseek_mla),
        (
            f"a sliding window of {window}",
            window is not None and (not layer_types or _SLIDING in layer_types),
        ),
        (
            "chunked-local attention",
            _CHUNKED in layer_types
            or getattr(text_config, "attention_chunk_size", None) is not None,
        ),
        ("ALiBi", model.uses_alibi),
        ("M-RoPE", model.uses_mrope),
        ("bidirectional attention to images", model.is_mm_prefix_lm),
    )
    return next((kind for kind, holds in checks if holds), None)


def eagle_type(model: "ModelConfig") -> str | None:
    """The type of an EAGLE head by its architecture; None for all other models."""
    head = _draft_head(model)
    if head is None or "Eagle" not in head or "MTP" in head or head.startswith("PE"):
        return None
    return "eagle3" if "Eagle3" in head else "eagle"


def _head_reason(head: "ModelConfig", target: "ModelConfig") -> str | None:
    """Why an EAGLE head cannot draft for this target, or None."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    if (kind := _unsupported_attention(head)) is not None:
        return (
            f"the EAGLE head must have full attention for method specinfer; got {kind}"
        )
    config = head.hf_config
    reads = getattr(config, "target_hidden_size", None) or head.get_hidden_size()
    for name, ours, theirs in (
        ("vocab_size", head.get_vocab_size(), target.get_vocab_size()),
        ("target_hidden_size", reads, target.get_hidden_size()),
    ):
        if ours != theirs:
            return (
                f"the EAGLE head's {name} must be the target's {theirs}; got {ours} of "
                f"{head.model!r}"
            )
    if eagle_type(head) == "eagle":
        return None
    model_cls, _ = target.registry.resolve_model_cls(target.architectures, target)
    if not supports_eagle3(model_cls):
        return (
            "the target's model class must give its inner states to an EAGLE-3 head; "
            f"got {model_cls.__name__}, which does not"
        )
    return None


def _draft_head(model: "ModelConfig") -> str | None:
    from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS

    for architecture in model.architectures:
        if architecture in _SPECULATIVE_DECODING_MODELS:
            return architecture
    return None


def _tokenizer_reason(ssm: "ModelConfig", target: "ModelConfig") -> str | None:
    ours = _read_vocabulary(ssm.model, ssm.revision)
    theirs = _read_vocabulary(target.tokenizer, target.tokenizer_revision)
    if ours is None or theirs is None:
        return None
    (tokens, added), (target_tokens, target_added) = ours, theirs
    # An instruction-tuned model may rename reserved tokens; that is harmless.
    ids = (tokens.keys() | target_tokens.keys()) - added - target_added
    num_different = sum(tokens.get(i) != target_tokens.get(i) for i in ids)
    if num_different == 0:
        return None
    return (
        f"the SSM's tokenizer must be the target's; got {num_different} different "
        f"tokens in {ssm.model!r}"
    )


def _draft_vocab_reason(ssm: "ModelConfig") -> str | None:
    from vllm_specinfer.draft_vocab import read_draft_vocab

    try:
        read_draft_vocab(ssm)
    except ValueError as error:
        return str(error)
    return None


def _read_vocabulary(
    model: str, revision: str | None
) -> tuple[dict[int, str], set[int]] | None:
    """Token by id, and the ids of added tokens, from tokenizer.json if it is there."""
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    try:
        content = get_hf_file_to_dict("tokenizer.json", model, revision)
        vocabulary = content["model"]["vocab"]
        added = {token["id"] for token in content.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError):
        # No fast tokenizer to compare; vocab_size has been compared already.
        return None
    if isinstance(vocabulary, dict):
        return {i: token for token, i in vocabulary.items()}, added
    return {i: token for i, (token, *_) in enumerate(vocabulary)}, added
