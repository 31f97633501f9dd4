"""EAGLE heads as sources: the text stays plain vLLM's, drafts are what torch says."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.e2e import engine
from tests.e2e.models import VOCAB, noisy_copy, tiny_llama, trained_head
from tests.e2e.test_greedy import GREEDY, PROMPTS, check, job, prompt
from vllm_specinfer.tuning import eagle
from vllm_specinfer.tuning.data import Sample
from vllm_specinfer.tuning.states import write_states

SAMPLED = {**GREEDY, "temperature": 0.7}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The target, an EAGLE-3 head trained for it, an SSM."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0, scale=3)
    head = trained_head(target, folder / "trained")
    return target, head, noisy_copy(target, folder / "ssm", 0.2)


def test_the_text_is_plain_decodings_and_the_head_helps(models):
    target, head, ssm = models
    params = [{**(SAMPLED if i % 2 else GREEDY), "seed": i} for i in range(8)]
    configs = {
        "chain": {"tree": "1,1,1,1"},
        "wide": {"tree": "4,2,2,1"},
        "merged": {
            "model": None,
            "ssms": [ssm, head, "suffix"],
            "num_speculative_tokens": 12,
        },
        "auto": {
            "model": None,
            "ssms": [{"model": head, "type": "eagle3"}],
            "scheduler": "auto",
        },
    }
    jobs = [{**job(models[:2], None, params), "plain_v2": True}]
    jobs += [job(models[:2], config, params) for config in configs.values()]
    lost = job(models[:2], {"tree": "1,1,1,1"}, params)
    jobs.append({**lost, "mutation": "states_lost"})
    plain, *found, lost = engine.run(jobs)
    rates = {}
    for name, result in zip(configs, found, strict=True):
        check(plain, result)
        rates[name] = result["accepted"] / result["drafts"]
    print({name: 1 + rate for name, rate in rates.items()}, "tokens per step")
    assert rates["wide"] > rates["chain"] > 0.3
    assert rates["merged"] > rates["wide"]
    # Worse drafts, the same text.
    check(plain, lost)
    assert lost["accepted"] / lost["drafts"] < 0.9 * rates["chain"]


@torch.inference_mode()
def reference_scores(target, head, tokens, path):
    """Log-probability of a path after the tokens, by the torch module."""
    model = LlamaForCausalLM.from_pretrained(target)
    config = eagle.head_config(model.config)
    module = eagle.EagleHead(config)
    module.load_state_dict(
        {k: v.float() for k, v in load_file(f"{head}/model.safetensors").items()}
    )
    layers = config.eagle_aux_hidden_state_layer_ids
    out = model.base_model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    states = torch.cat([out.hidden_states[i] for i in layers], -1)
    # The head has no states of the target from the last token on.
    padding = torch.zeros(1, 1 + len(path), states.shape[2])
    ids = torch.tensor([[*tokens, *path]])
    embeds = model.get_input_embeddings()(ids)
    outputs = module.unroll(torch.cat([states, padding], 1), embeds, len(path))
    total, scores = 0.0, []
    for output, token in zip(outputs, path, strict=True):
        logits = output[0, len(tokens) - 2] @ model.lm_head.weight.T
        total += float(logits.log_softmax(-1)[token])
        scores.append(total)
    return scores


def test_drafts_are_what_the_torch_module_says(models, tmp_path):
    """Wherever a step stands: after a prompt in chunks, after accepted branches."""
    target, head, _ = models
    file = tmp_path / "drafts.json"
    chunks = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    run = job((target, head), {"tree": "2,2,1"}, prompts=[prompt(90, 1), [5, 6]])
    run["llm"].update(chunks)
    engine.run([{**run, "mutation": "record_drafts"}], RECORDED_DRAFTS=str(file))
    recorded = json.loads(file.read_text())
    assert len(recorded) > 20
    for known, tokens, parents, scores in recorded[::7]:
        for leaf in range(len(tokens)):
            path, node = [], leaf
            while node >= 0:
                path.insert(0, tokens[node])
                node = parents[node]
            want = reference_scores(target, head, known, path)[-1]
            np.testing.assert_allclose(scores[leaf], want, atol=2e-3)


def test_stock_vllm_runs_the_head_too(models):
    """Its own chain of the head's best tokens is accepted as often as ours."""
    stock = job(models[:2])
    stock["llm"]["speculative_config"] = {
        "method": "eagle3",
        "model": models[1],
        "num_speculative_tokens": 3,
    }
    ours, theirs = engine.run([job(models[:2], {"tree": "1,1,1"}), stock])
    assert theirs["tokens"] == ours["tokens"]
    assert (theirs["drafts"], theirs["accepted"]) == (ours["drafts"], ours["accepted"])
    assert theirs["accepted"] > 0


def test_a_cached_prompt_that_the_head_sat_out(models):
    shared = prompt(70, 7)
    prompts = [shared + prompt(n, n) for n in (9, 5)]
    jobs = [
        {**job(models[:2], prompts=prompts, batched=False), "plain_v2": True},
        {
            **job(models[:2], {}, prompts=prompts, batched=False),
            "mutation": "ssms_sit_out_the_first_request",
        },
    ]
    check(*engine.run(jobs))


def test_a_prompt_that_all_share_is_read_with_its_states(models):
    """As well as where each has blocks of its own."""
    start = prompt(4, 0)
    writer = job(models[:2], None, [{**GREEDY, "max_tokens": 96}], [start])
    (written,) = engine.run([writer])
    params = [{**SAMPLED, "seed": i} for i in range(8)]
    prompts = [start + written["tokens"][0][0]] * 8
    plain = {**job(models[:2], None, params, prompts), "plain_v2": True}
    tree = {"tree": "1,1,1"}
    found = [
        job(models[:2], tree, params, prompts, enable_prefix_caching=caching)
        for caching in (True, False)
    ]
    plain, shared, alone = engine.run([plain, *found])
    check(plain, shared)
    check(plain, alone)
    assert alone["ssm_rows"] - shared["ssm_rows"] == shared["cache_hits"] == 7 * 96
    for name in ("drafts", "accepted_per_pos"):
        assert shared[name] == alone[name]
    assert alone["accepted"] > 0.3 * alone["drafts"]


def llama_weights(config, num_inputs, layer):
    size, heads = config["hidden_size"], config["num_attention_heads"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (heads * config["head_dim"], num_inputs * size),
        "self_attn.k_proj": (kv, num_inputs * size),
        "self_attn.v_proj": (kv, num_inputs * size),
        "self_attn.o_proj": (size, heads * config["head_dim"]),
        "mlp.gate_proj": (config["intermediate_size"], size),
        "mlp.up_proj": (config["intermediate_size"], size),
        "mlp.down_proj": (size, config["intermediate_size"]),
    }
    weights = {
        f"{layer}.{name}.weight": torch.randn(shape) * 0.05
        for name, shape in shapes.items()
    }
    return weights | {f"{layer}.post_attention_layernorm.weight": torch.ones(size)}


LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    # Shorter than the target's, as in published heads.
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
}
DRAFT_VOCAB = 40


def eagle1():
    """As yuhuili/EAGLE-LLaMA3-Instruct-8B: an embedding of its own, no head."""
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "bias": False}
    weights = llama_weights(config, 1, "layers.0")
    weights["fc.weight"] = torch.randn(128, 256) * 0.05
    weights["embed_tokens.weight"] = torch.randn(VOCAB, 128)
    return config, weights, "eagle"


def eagle3_weights():
    weights = llama_weights(LLAMA, 2, "midlayer")
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        weights[f"{name}.weight"] = torch.ones(128)
    weights["fc.weight"] = torch.randn(128, 3 * 128) * 0.05
    weights["lm_head.weight"] = torch.randn(DRAFT_VOCAB, 128)
    tokens = torch.arange(DRAFT_VOCAB) * 2
    weights["d2t"] = tokens - torch.arange(DRAFT_VOCAB)
    weights["t2d"] = torch.isin(torch.arange(VOCAB), tokens)
    return weights


def eagle3():
    """As yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: a vocabulary of its own."""
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    return config, eagle3_weights(), None


def eagle3_of_last_states():
    """An EAGLE-3 head that reads what an EAGLE one does."""
    config, weights, kind = eagle3()
    del weights["fc.weight"]
    config["eagle_config"] = {"use_aux_hidden_state": False}
    return config, weights, kind


def speculators():
    """As the library speculators writes them: the layer's config is nested."""
    weights = {
        name.replace("midlayer", "layers.0"): w for name, w in eagle3_weights().items()
    }
    weights["embed_tokens.weight"] = torch.randn(VOCAB, 128)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "transformer_layer_config": LLAMA,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "name_or_path": "a/target",
                "architectures": ["LlamaForCausalLM"],
            },
        },
    }
    return config, weights, None


def test_published_layouts_load_and_draft(models, tmp_path):
    target = models[0]
    params = [{**GREEDY, "max_tokens": 100}]
    jobs = [job((target, None), params=params, prompts=PROMPTS)]
    layouts = (eagle1, eagle3, eagle3_of_last_states, speculators)
    for make in layouts:
        torch.manual_seed(0)
        config, weights, kind = make()
        folder = tmp_path / make.__name__
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        ssm = {"model": str(folder)} | ({"type": kind} if kind else {})
        config = {"model": None, "ssms": [ssm], "tree": "12,1"}
        jobs.append(job((target, None), config, params))
    plain, *found = engine.run(jobs)
    for make, result in zip(layouts, found, strict=True):
        check(plain, result)
        # Random weights, but 12 of 96 tokens are tried.
        assert result["accepted"] > 0, make.__name__


@pytest.mark.parametrize(
    ("ssms", "sentence"),
    [
        (lambda head, ssm: [head, head], "at most one EAGLE head"),
        (lambda head, ssm: [{"model": head, "type": "ssm"}], "type must be that"),
        (lambda head, ssm: [{"model": head, "type": "eagle"}], "type must be that"),
        (lambda head, ssm: [{"model": head, "type": "medusa"}], "must be one of"),
    ],
)
def test_wrong_types_are_refused_at_start_up(models, ssms, sentence):
    from vllm.config import ModelConfig, ParallelConfig

    from vllm_specinfer.config import SpecInferConfig
    from vllm_specinfer.parsing import parse_options

    target, head, ssm = models
    with pytest.raises(ValueError, match=sentence):
        SpecInferConfig.create(
            parse_options({"ssms": ssms(head, ssm)}),
            ModelConfig(target, skip_tokenizer_init=True, max_model_len=256),
            ParallelConfig(),
        )


def test_states_survive_their_way_to_the_disk(models, tmp_path):
    target = LlamaForCausalLM.from_pretrained(models[0])
    samples = [Sample(prompt(n, n), prompt(9, n)) for n in (3, 30, 4, 50)]
    layers = [0, 1]
    file = tmp_path / "states.bin"
    write_states(file, target.base_model, layers, samples[:2])
    # A kill in the middle of a sample, then all of them.
    with file.open("ab") as out:
        out.write(b"12345")
    states = write_states(file, target.base_model, layers, samples)
    for i, sample in enumerate(samples):
        ids = torch.tensor([sample.prompt + sample.answer])
        with torch.inference_mode():
            out = target.base_model(ids, output_hidden_states=True)
        want = [*(out.hidden_states[k] for k in layers), out.last_hidden_state]
        got_sample, got = states[i]
        assert got_sample == sample
        torch.testing.assert_close(
            got, torch.cat(want, -1)[0].bfloat16(), rtol=0.02, atol=0.02
        )
