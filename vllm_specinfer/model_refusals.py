"""Which models and layers method specinfer refuses; see ``refusals.py``."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_specinfer.draft_heads import draft_head, eagle_type, reads_layers
from vllm_specinfer.tree.token_tree import WORD_BITS

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_CHUNKED = "chunked_attention"


def model_reason(model: "ModelConfig", role: str) -> str | None:
    """Why a model cannot be a target or an SSM, or None.

    Args:
        model: Its config.
        role: How the sentence names it, "the target" or "the SSM".
    """
    if (kind := _unsupported_kind(model)) is not None:
        return (
            f"{role} must be a causal language model with full or sliding-window "
            f"attention for method specinfer; got {kind} "
            f"({', '.join(model.architectures)})"
        )
    return None


def ssm_reason(ssm: "ModelConfig", target: "ModelConfig") -> str | None:
    """Why a model cannot draft for this target, or None."""
    return (
        _fit_reason(ssm, target)
        or _experts_reason(ssm, target)
        or _draft_vocab_reason(ssm)
    )


def _experts_reason(ssm: "ModelConfig", target: "ModelConfig") -> str | None:
    """Why both models' experts cannot live in one process, or None.

    vLLM names them alike (vllm/model_executor/models/transformers/moe.py).
    """
    models = ssm, target
    if all(model.is_moe and model.using_transformers_backend() for model in models):
        return (
            "the SSM must be dense where vLLM runs both models by its Transformers "
            f"backend; got experts in the SSM {ssm.model!r}, too"
        )
    return None


def ranks_reason(ssm: "ModelConfig", num_ranks: int) -> str | None:
    """Why an SSM cannot be split over the target's ranks, or None."""
    heads = ssm.model_arch_config.total_num_attention_heads
    if heads % num_ranks:
        return (
            f"the SSM's attention heads must be divisible by the {num_ranks} ranks of "
            f"tensor parallelism; got {heads} in {ssm.model!r}"
        )
    return None


def head_reason(head: "ModelConfig", target: "ModelConfig") -> str | None:
    """Why an EAGLE head cannot draft for this target, or None."""
    if (kind := _unsupported_attention(head)) is not None:
        return (
            "the EAGLE head must have full or sliding-window attention for method "
            f"specinfer; got {kind}"
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
    return inner_states_reason(target) if reads_layers(head) else None


def inner_states_reason(target: "ModelConfig") -> str | None:
    """Why no EAGLE-3 head can draft for this target, or None."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    model_cls, _ = target.registry.resolve_model_cls(target.architectures, target)
    if not supports_eagle3(model_cls):
        return (
            "the target's model class must give its inner states to an EAGLE-3 head; "
            f"got {model_cls.__name__}, which does not"
        )
    return None


def layer_reason(
    layers: Iterable[tuple[str, Any]],
    words: int,
    words_of_ssms: Mapping[str, int] | None = None,
) -> str | None:
    """Why a built model's attention layers cannot run trees, or None.

    Configs do not always show these; the layers do.

    Args:
        layers: Name and layer pairs, as in
            ``compilation_config.static_forward_context.items()``.
        words: 64-bit words of what a row of a tree sees of it.
        words_of_ssms: The same by name, of layers where they differ.
    """
    words_of_ssms = words_of_ssms or {}
    for name, layer in layers:
        # A window begins before the tree: kernels do not look for it among the nodes.
        least_window = WORD_BITS * words_of_ssms.get(name, words)
        impl = getattr(layer, "impl", None)
        for holder in (layer, impl):
            window = _window_of(holder)
            if window is not None and window < least_window:
                return (
                    f"sliding windows must hold at least {least_window} tokens with "
                    f"trees of this size; got {window} in {name}"
                )
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
        # vLLM has layers that choose their backend, and such that change what its
        # builder makes of a step.
        backend = getattr(layer, "attn_backend", None)
        if backend is None:
            continue
        builder = backend.get_builder_cls()
        if not getattr(builder, "takes_trees", False):
            return _layer_sentence(name, f"the backend {backend.get_name()}")
        if not builder.__module__.startswith("vllm_specinfer."):
            return _layer_sentence(name, type(layer).__name__)
    return None


def _window_of(holder: Any) -> int | None:
    """The sliding window of an attention layer or its implementation, in tokens."""
    window = getattr(holder, "sliding_window", None)
    if isinstance(window, tuple):
        window = window[0] + 1  # tokens before the row's own
    # Backends spell "no window" as None, -1 or (-1, -1).
    return None if window in (None, -1, 0) else window


def _fit_reason(ssm: "ModelConfig", target: "ModelConfig") -> str | None:
    if eagle_type(ssm) is not None:
        return head_reason(ssm, target)
    if (head := draft_head(ssm)) is not None:
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


def _unsupported_kind(model: "ModelConfig") -> str | None:
    if (kind := _unsupported_attention(model)) is not None:
        return kind
    if model.registry.is_text_generation_model(model.architectures, model):
        return None
    return "no text generation"


def _unsupported_attention(model: "ModelConfig") -> str | None:
    text_config = model.hf_text_config
    layer_types = getattr(text_config, "layer_types", None) or ()
    checks = (
        ("an encoder-decoder", model.is_encoder_decoder),
        ("a pooling model", model.runner_type == "pooling"),
        ("a diffusion model", model.is_diffusion),
        # is_hybrid first: a hybrid also has an inner state.
        ("a hybrid with recurrent layers", model.is_hybrid),
        ("a recurrent state", model.has_inner_state),
        ("no attention", model.is_attention_free),
        ("MLA", model.use_mla or model.is_deepseek_mla),
        (
            "chunked-local attention",
            _CHUNKED in layer_types
            or getattr(text_config, "attention_chunk_size", None) is not None,
        ),
        ("ALiBi", model.uses_alibi),
        ("bidirectional attention to images", model.is_mm_prefix_lm),
        (
            # One token at a time, each loop reads what the last one has left of the
            # tokens before; of those in the same step it reads its own.
            "loops over the same K/V",
            getattr(text_config, "recurrent_kv_cache_mode", None) == "last_loop"
            and text_config.n_recurrent_loops > 1,
        ),
    )
    return next((kind for kind, holds in checks if holds), None)


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


def _layer_sentence(name: str, kind: str) -> str:
    return (
        "every attention layer must attend to the whole prefix for method specinfer; "
        f"got {kind} in {name}"
    )
