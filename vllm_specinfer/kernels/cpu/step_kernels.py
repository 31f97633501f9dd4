"""The table of vLLM step kernels and what runs instead of each on CPU."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_specinfer.kernels.cpu import (
    block_tables,
    inputs,
    logits_processors,
    logprobs,
    penalties,
    sampling,
    thinking_budget,
)

_PACKAGE = "vllm.v1.worker.gpu."

# vLLM kernel, without package, leading underscore and "_kernel", -> replacement.
REPLACEMENTS: dict[str, Callable[..., None]] = {
    "buffer_utils.apply_write": inputs.apply_write,
    "input_batch.prepare_prefill_inputs": inputs.prepare_prefill_inputs,
    "model_states.prompt_embeds.apply_prompt_embeds": inputs.apply_prompt_embeds,
    "input_batch.prepare_pos_seq_lens": inputs.prepare_pos_seq_lens,
    "mm.rope.prepare_rope_positions": inputs.prepare_rope_positions,
    "input_batch.combine_sampled_and_draft_tokens": (
        inputs.combine_sampled_and_draft_tokens
    ),
    "input_batch.get_num_sampled_and_rejected": inputs.get_num_sampled_and_rejected,
    "input_batch.post_update": inputs.post_update,
    "input_batch.expand_idx_mapping": inputs.expand_idx_mapping,
    "block_table.gather_block_tables": block_tables.gather_block_tables,
    "block_table.compute_slot_mappings": block_tables.compute_slot_mappings,
    "sample.gumbel.temperature": sampling.temperature,
    "sample.gumbel.gumbel_sample": sampling.gumbel_sample,
    "sample.min_p.min_p": sampling.min_p,
    "sample.penalties.penalties": penalties.penalties,
    "sample.penalties.bincount": penalties.bincount,
    "sample.logit_bias.bias": logits_processors.bias,
    "sample.bad_words.bad_words": logits_processors.bad_words,
    "structured_outputs.apply_grammar_bitmask": (
        logits_processors.apply_grammar_bitmask
    ),
    "metrics.logits.num_nans": logits_processors.num_nans,
    "sample.logprob.topk_log_softmax": logprobs.topk_log_softmax,
    "sample.logprob.ranks": logprobs.ranks,
    "sample.logprob.fill_logprob_token_ids": logprobs.fill_logprob_token_ids,
    "sample.prompt_logprob.prompt_logprobs_token_ids": (
        logprobs.prompt_logprobs_token_ids
    ),
    "sample.thinking_budget.update_committed_marker_cache": (
        thinking_budget.update_committed_marker_cache
    ),
    "sample.thinking_budget.thinking_budget": thinking_budget.thinking_budget,
}

_registered: set[str] = set()


def kernel_name(short_name: str) -> str:
    """The qualified vLLM name of a key of ``REPLACEMENTS``."""
    module, _, name = short_name.rpartition(".")
    return f"{_PACKAGE}{module}._{name}_kernel"


def register(
    replacements: Mapping[str, Callable[..., None]] = REPLACEMENTS,
) -> None:
    """Put the replacements in the place of vLLM's kernels, once per process.

    Raises:
        RuntimeError: vLLM has no kernel of a name in ``replacements``.
    """
    from vllm.triton_utils.dispatcher import register_kernels

    missing = {
        kernel_name(short): implementation
        for short, implementation in replacements.items()
        if short not in _registered
    }
    if not missing:
        return  # vLLM would look through all modules
    for name in missing:
        _require(name)
    with _without_llvmlite():
        register_kernels(missing)
    _registered.update(replacements)


def _require(name: str) -> None:
    import vllm

    module_name, _, attribute = name.rpartition(".")
    try:
        module: Any = importlib.import_module(module_name)
    except ImportError:
        module = None
    if not hasattr(module, attribute):
        raise RuntimeError(
            f"vLLM must have the kernel {name} to run Model Runner V2 on CPU; got "
            f"{vllm.__version__} without it"
        )


@contextmanager
def _without_llvmlite() -> Iterator[None]:
    """Hide llvmlite, which numba loads, from the dispatcher's scan.

    Symptom: the scan reads ``vars()`` of every attribute of every module and fails
    on ``llvmlite.binding.ffi.lib``, whose ``__dict__`` is not a dictionary.
    Removed when: vLLM's dispatcher skips such attributes.
    """
    hidden = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "llvmlite"
    }
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)
