"""Models and layers that cannot be used are refused in one sentence at start-up."""

import json
from types import SimpleNamespace

import pytest

from tests.conftest import LLAMA, write_model
from vllm_specinfer import model_refusals
from vllm_specinfer.draft_vocab import DRAFT_VOCAB_FILE, read_draft_vocab

pytestmark = pytest.mark.usefixtures("v2_undone")

MISTRAL = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 64,
}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "sliding_window": 64,
    "use_sliding_window": False,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
}
MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "state_size": 16,
    "vocab_size": 128,
    "torch_dtype": "float32",
}
JAMBA = LLAMA | {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "num_hidden_layers": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "num_experts": 1,
}
BLOOM = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "hidden_size": 64,
    "n_head": 2,
    "n_layer": 2,
    "seq_length": 256,
    "vocab_size": 128,
    "torch_dtype": "float32",
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 256,
    "vocab_size": 128,
}
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
# Qwen2-VL's text model; the whole needs torchvision to be looked at.
MROPE = LLAMA | {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 6, 6],
    },
}

# vLLM 0.33's looped model; 0.32 does not know its type.
DORY = LLAMA | {"recurrent_kv_cache_mode": "last_loop", "n_recurrent_loops": 2}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LLAMA | {"attention_chunk_size": 64}, "chunked-local attention"),
        (DEEPSEEK, "MLA"),
        (MAMBA, "a recurrent state"),
        (JAMBA, "a hybrid with recurrent layers"),
        (BLOOM, "ALiBi"),
        (BERT, "a pooling model"),
        (DORY, "loops over the same K/V"),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else None,
)
def test_target_without_full_causal_attention_is_refused(refusal, config, kind):
    assert refusal(target=config).startswith(
        "the target must be a causal language model with full or sliding-window "
        f"attention for method specinfer; got {kind} ({config['architectures'][0]})"
    )


@pytest.mark.parametrize("config", [DEEPSEEK, MAMBA, BLOOM])
def test_ssm_without_full_causal_attention_is_refused(refusal, config):
    assert refusal(ssm=config).startswith("the SSM must be a causal language model")


def test_experts_that_vllm_would_name_alike_are_refused():
    def model(*kinds):
        return SimpleNamespace(
            model="m",
            is_moe="experts" in kinds,
            using_transformers_backend=lambda: "theirs" in kinds,
        )

    both = model("experts", "theirs")
    assert "experts in the SSM 'm', too" in model_refusals._experts_reason(both, both)
    for other in (model(), model("experts"), model("theirs")):
        assert model_refusals._experts_reason(both, other) is None
        assert model_refusals._experts_reason(other, both) is None


def test_draft_heads_are_eagle_heads_or_refused(refusal):
    for kind in ("PEagleDraftModel", "DeepSeekMTPModel"):
        head = LLAMA | {"architectures": [kind]}
        assert refusal(ssm=head).endswith(f"got the draft head {kind}")


@pytest.mark.parametrize(
    ("target", "head", "sentence"),
    [
        (LLAMA, {"vocab_size": 48}, "the EAGLE head's vocab_size must be"),
        (LLAMA, {"hidden_size": 128}, "the EAGLE head's target_hidden_size must be"),
        (LLAMA, {"attention_chunk_size": 64}, "the EAGLE head must have full or"),
        (GPT2, {}, "the target's model class must give its inner states"),
    ],
)
def test_an_eagle_head_must_fit_the_target(refusal, target, head, sentence):
    head = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]} | head
    assert refusal(target=target, ssm=head).startswith(sentence)


@pytest.mark.parametrize("reads_layers", [True, False])
def test_a_head_of_the_last_states_needs_no_inner_ones(monkeypatch, reads_layers):
    monkeypatch.setattr(model_refusals, "_unsupported_attention", lambda model: None)
    monkeypatch.setattr(model_refusals, "inner_states_reason", lambda target: "inner")
    model = SimpleNamespace(
        architectures=["LlamaForCausalLMEagle3"],
        hf_config=SimpleNamespace(eagle_config={"use_aux_hidden_state": reads_layers}),
        get_vocab_size=lambda: 96,
        get_hidden_size=lambda: 64,
    )
    reason = model_refusals.head_reason(model, model)
    assert reason == ("inner" if reads_layers else None)


@pytest.mark.parametrize(
    "config",
    [DORY | {"n_recurrent_loops": 1}, DORY | {"recurrent_kv_cache_mode": "per_loop"}],
)
def test_loops_with_their_own_kv_are_accepted(config, tmp_path):
    from vllm.config import ModelConfig

    model = ModelConfig(write_model(tmp_path, config), skip_tokenizer_init=True)
    assert model_refusals.model_reason(model, "the target") is None


@pytest.mark.parametrize(
    "config", [QWEN2, MISTRAL, MISTRAL | {"sliding_window": None}, MROPE]
)
def test_sliding_windows_and_rotations_are_accepted(config, tmp_path):
    from vllm.config import ModelConfig

    model = ModelConfig(write_model(tmp_path, config), skip_tokenizer_init=True)
    assert model_refusals.model_reason(model, "the target") is None


@pytest.mark.parametrize(
    ("flag", "kind"),
    [
        ("is_encoder_decoder", "an encoder-decoder"),
        ("is_diffusion", "a diffusion model"),
        ("is_mm_prefix_lm", "bidirectional attention to images"),
        ("is_attention_free", "no attention"),
    ],
)
def test_kinds_without_a_small_config_are_refused_by_vllms_own_flag(flag, kind):
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(),
        architectures=["X"],
        runner_type="generate",
        get_sliding_window=lambda: None,
        registry=SimpleNamespace(is_text_generation_model=lambda *_: True),
        **dict.fromkeys(
            (
                "is_encoder_decoder",
                "is_diffusion",
                "is_hybrid",
                "has_inner_state",
                "is_attention_free",
                "use_mla",
                "is_deepseek_mla",
                "uses_alibi",
                "is_mm_prefix_lm",
            ),
            False,
        ),
    )
    assert model_refusals.model_reason(model, "the target") is None
    setattr(model, flag, True)
    assert f"got {kind} (X)" in model_refusals.model_reason(model, "the target")


def test_another_vocabulary_size_is_refused(refusal):
    sentence = refusal(ssm=LLAMA | {"vocab_size": 64})
    assert "vocab_size must be the target's 128; got 64" in sentence


def write_tokenizer(folder, vocabulary, added=()):
    content = {
        "model": {"vocab": vocabulary},
        "added_tokens": [{"id": i, "content": text} for i, text in added],
    }
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_another_tokenizer_of_the_same_size_is_refused(refusal, tmp_path):
    write_tokenizer(tmp_path / "target", {"a": 0, "b": 1, "c": 2})
    write_tokenizer(tmp_path / "ssm", {"a": 0, "b": 2, "c": 1})
    assert "tokenizer must be the target's; got 2 different" in refusal()


def test_renamed_special_tokens_are_the_same_tokenizer(tmp_path):
    write_tokenizer(tmp_path / "target", {"a": 0, "b": 1}, [(1, "b")])
    write_tokenizer(tmp_path / "ssm", {"a": 0, "<|end|>": 1})
    ssm = SimpleNamespace(model=str(tmp_path / "ssm"), revision=None)
    target = SimpleNamespace(
        tokenizer=str(tmp_path / "target"), tokenizer_revision=None
    )
    assert model_refusals._tokenizer_reason(ssm, target) is None


def test_unigram_vocabulary_is_compared_by_position(tmp_path):
    write_tokenizer(tmp_path / "target", [["a", -1.0], ["b", -2.0]])
    write_tokenizer(tmp_path / "ssm", [["a", -1.5], ["c", -2.0]])
    ssm = SimpleNamespace(model=str(tmp_path / "ssm"), revision=None)
    target = SimpleNamespace(
        tokenizer=str(tmp_path / "target"), tokenizer_revision=None
    )
    assert "got 1 different" in model_refusals._tokenizer_reason(ssm, target)


def test_heads_that_ranks_cannot_share_are_refused(refusal):
    target = LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 4}
    ssm = LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 1}
    ssm |= {"hidden_size": 96}
    sentence = refusal(target=target, ssm=ssm, tensor_parallel_size=2)
    assert "divisible by the 2 ranks of tensor parallelism; got 3 in" in sentence


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("{", "Expecting property name"),
        ("\xff", "'utf-8' codec"),
        ("[" * 100_000, "maximum recursion depth"),
        ("[1, 2]", "no such list"),
        ('{"tokens": 3}', "no such list"),
        ('{"tokens": []}', "no ids"),
        ('{"tokens": [1, 128]}', "128"),
        ('{"tokens": [-1]}', "-1"),
        ('{"tokens": [1, true]}', "True"),
        ('{"tokens": ["1"]}', "'1'"),
        ('{"tokens": [4, 7, 7]}', "7 2 times"),
    ],
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForCausalLMEagle3"])
def test_a_wrong_draft_vocabulary_is_refused(
    refusal, tmp_path, architecture, content, found
):
    (tmp_path / "ssm").mkdir()
    (tmp_path / "ssm" / DRAFT_VOCAB_FILE).write_text(content, encoding="latin-1")
    sentence = refusal(ssm=LLAMA | {"architectures": [architecture]})
    assert sentence.startswith("draft_vocab.json of the SSM ")
    assert " with distinct ids below 128; got " + found in sentence


@pytest.mark.parametrize("tokens", [None, [127, 0, 5]])
def test_a_draft_vocabulary_need_not_be_there(tmp_path, tokens):
    if tokens is not None:
        content = json.dumps({"tokens": tokens})
        (tmp_path / DRAFT_VOCAB_FILE).write_text(content)
    ssm = SimpleNamespace(
        model=str(tmp_path), revision=None, get_vocab_size=lambda: 128
    )
    assert read_draft_vocab(ssm) == tokens
    assert model_refusals._draft_vocab_reason(ssm) is None


def test_an_ssm_with_fewer_positions_is_refused(refusal):
    sentence = refusal(ssm=LLAMA | {"max_position_embeddings": 128})
    assert sentence.startswith("max_model_len must be at most the 128 positions")
    assert sentence.endswith("got 256")


def test_a_shorter_max_model_len_fits_a_short_ssm(make_llama, spec_of):
    ssm = make_llama("ssm", max_position_embeddings=128)
    spec = spec_of({"model": ssm}, max_model_len=100)
    assert spec.draft_model_config.max_model_len == 100


@pytest.mark.parametrize(
    "config", [BERT, {"model_type": "no_such_type", "architectures": ["No"]}]
)
def test_a_model_vllm_cannot_draft_with_is_refused(refusal, config):
    sentence = refusal(ssm=config)
    assert sentence.startswith("model must be an SSM that vLLM can load; got")


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        ({"impl": SimpleNamespace(alibi_slopes=[1.0])}, "ALiBi"),
        ({"attention_chunk_size": 64}, "chunked-local attention"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"kv_lora_rank": 32}, "MLA"),
        ({"mamba_type": "mamba1"}, "a recurrent state"),
    ],
)
def test_a_layer_that_its_config_did_not_show_is_refused(layer, kind):
    reason = model_refusals.layer_reason([("layers.0", SimpleNamespace(**layer))], 1)
    assert f"got {kind}" in reason and "layers.0" in reason


def test_a_layer_whose_backend_is_not_ours_is_refused():
    """vLLM has layers that choose one, and those of prefix language models change what
    a backend builds; configs do not show it."""
    from vllm.model_executor.layers.attention.encoder_only_attention import (
        create_encoder_only_attention_backend,
    )
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    from vllm_specinfer.attention.cpu import CPUTreeAttentionBackend
    from vllm_specinfer.attention.cuda import CUDATreeAttentionBackend
    from vllm_specinfer.attention.xformers import XformersBackend

    class PrefixAttention(SimpleNamespace):
        pass

    changed = create_encoder_only_attention_backend(CPUTreeAttentionBackend)
    for backend, reason in (
        (changed, "PrefixAttention"),
        (FlashAttentionBackend, "the backend FLASH_ATTN"),
        (CPUTreeAttentionBackend, ""),
        (CUDATreeAttentionBackend, ""),
        (XformersBackend, ""),
    ):
        layer = PrefixAttention(attn_backend=backend)
        found = model_refusals.layer_reason([("layers.0", layer)], 1)
        assert reason in (found or "") and (found is None) == (not reason)


def window_reason(window, words, name="layers.0"):
    impl = SimpleNamespace(sliding_window=window, alibi_slopes=None)
    layer = SimpleNamespace(sliding_window=None, impl=impl)
    return model_refusals.layer_reason([(name, layer)], words, {"ssm.0": 2})


@pytest.mark.parametrize("window", [None, -1, (-1, -1), 64, (63, 0)])
def test_a_layer_whose_window_holds_a_tree_is_accepted(window):
    assert window_reason(window, 1) is None


@pytest.mark.parametrize(
    ("window", "words", "name"),
    [(63, 1, "layers.0"), ((62, 0), 1, "layers.0"), (127, 2, "layers.0")]
    # Passes of an SSM may have more rows than its trees have nodes.
    + [(127, 1, "ssm.0")],
)
def test_a_window_that_may_end_inside_a_tree_is_refused(window, words, name):
    least = 64 if window != 127 else 128
    window_in_tokens = window if isinstance(window, int) else 63
    assert window_reason(window, words, name) == (
        f"sliding windows must hold at least {least} tokens with trees of this size; "
        f"got {window_in_tokens} in {name}"
    )
