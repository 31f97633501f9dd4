"""Several sources in one engine: the text stays plain vLLM's, whoever proposes."""

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from tests.e2e import distribution, engine
from tests.e2e.models import VOCAB, noisy_copy, tiny_llama
from tests.e2e.test_greedy import GREEDY, PROMPTS, check, job

SAMPLED = {**GREEDY, "temperature": 0.7}
# Text that any lookup foresees.
MONOTONOUS = {**GREEDY, "allowed_token_ids": [7]}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The target, two copies of it, and an SSM of another architecture and size."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0)
    copies = [noisy_copy(target, folder / f"ssm{i}", 0.2, seed=i) for i in (1, 2)]
    torch.manual_seed(0)
    opt = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=512,
        word_embed_proj_dim=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    OPTForCausalLM(opt).save_pretrained(folder / "opt")
    return target, *copies, str(folder / "opt")


def pools(models):
    """Configurations by what is special about them."""
    _, one, other, opt = models
    return {
        "one": {"ssms": [one]},
        "two": {"ssms": [one, other]},
        "shapes": {
            "ssms": [{"model": one, "tree": [1, 2, 1]}, {"model": opt, "tree": [2, 2]}],
        },
        "share": {"ssms": [one, {"model": other, "num_speculative_tokens": 2}]},
        "everything": {
            "ssms": ["ngram", one, "suffix", other],
            "num_speculative_tokens": 12,
        },
        "ngram": {"model": "ngram"},
        "suffix": {"model": "suffix"},
    }


def by_label(result, name):
    """The values of one metric by its label."""
    metrics = result["metrics"].items()
    return {key.split()[1]: v for key, v in metrics if key.split()[0] == name}


def check_metrics(result):
    """The trees' metrics agree with vLLM's, and with the text."""
    metrics, drafts, accepted = (result[k] for k in ("metrics", "drafts", "accepted"))
    assert sum(by_label(result, "accepted_tokens").values()) == accepted
    assert metrics["accepted_depth"] == [drafts, accepted]
    assert sum(result["accepted_per_pos"]) == accepted
    assert metrics["step_nodes"][1] == result["drafted"] >= accepted
    assert sum(by_label(result, "drafted_nodes").values()) >= result["drafted"]
    for phase, (count, seconds) in by_label(result, "phase_seconds").items():
        assert 0 < seconds < 60 and count > 0, phase
    # vLLM pads prompts of one token with drafts: they count as prompts all the same.
    plain = by_label(result, "plain_request_steps")
    assert plain.pop("prefill") >= len(result["tokens"])
    assert drafts + sum(plain.values()) == result["decode_steps"]


def test_every_pool_gives_the_text_of_plain_decoding(models):
    kinds = [GREEDY, SAMPLED, MONOTONOUS, SAMPLED]
    # Every prompt twice, so that the second can be looked up in the first's text.
    prompts = [p for p in PROMPTS for _ in range(2)]
    params = [{**kinds[i // 2 % 4], "seed": i // 2} for i in range(len(prompts))]
    llm = {"max_num_seqs": 3}
    jobs = [{**job(models[:2], None, params, prompts, **llm), "plain_v2": True}]
    for config in pools(models).values():
        config = {"model": None, **config}
        jobs.append(job(models[:2], config, params, prompts, **llm))
    plain, *results = engine.run(jobs)
    assert not plain["metrics"]
    found, rates = dict(zip(pools(models), results, strict=True)), {}
    for name, result in found.items():
        check(plain, result)
        check_metrics(result)
        rates[name] = result["accepted"] / result["drafts"]
    # vLLM's positions are depths: the deepest of these trees has three levels.
    reached = found["shapes"]["accepted_per_pos"]
    assert min(reached[:3]) > 0 and not any(reached[3:])
    accepted = by_label(found["everything"], "accepted_tokens")
    assert set(accepted) == {"ngram", "suffix", "ssm0", "ssm1"}
    assert min(accepted.values()) > 0
    print({name: 1 + rate for name, rate in rates.items()}, "tokens per step")
    assert rates["two"] > rates["one"]
    assert rates["everything"] > rates["two"]
    assert min(rates["ngram"], rates["suffix"]) > 1


def test_texts_with_a_cache_salt_are_looked_up_by_nobody_else(models):
    def run_twice(*salts):
        config = {"model": None, "ssms": ["suffix"]}
        made = job(models[:2], config, prompts=[PROMPTS[-1]] * 2, batched=False)
        return {**made, "salts": salts}

    shared, salted, reads = engine.run(
        [run_twice(None, None), run_twice("a", "a"), run_twice(None, "a")]
    )
    assert shared["tokens"] == salted["tokens"] == reads["tokens"]
    assert shared["accepted"] == reads["accepted"] > 2 * salted["accepted"]


def test_seeded_draws_are_not_proposed_to_who_has_the_same_seed(models):
    """They would be tested against the noise that they come from."""

    def run(rule, *between):
        """The same request twice; what is between them knows what the first one got."""
        seeded = {**SAMPLED, "seed": 5}
        config = {"model": None, "ssms": ["suffix", models[1]], "verification": rule}
        prompts = [PROMPTS[-1], *between, PROMPTS[-1]]
        params = [seeded, *[GREEDY] * len(between), seeded]
        return job(models[:2], config, params, prompts, batched=False, max_num_seqs=1)

    tested, coupled = engine.run([run("rrs"), run("coupled")])
    (answer,), _ = tested["tokens"]
    (told,) = engine.run([run("rrs", PROMPTS[-1] + answer)])
    for result in tested, coupled, told:
        assert result["tokens"][0] == result["tokens"][-1]
    assert told["tokens"][0] == [answer]
    # The noise itself is the target's there, and what is known of it no harm.
    found = [by_label(r, "accepted_tokens")["suffix"] for r in (coupled, tested)]
    assert found[0] > 2 * found[1]


def test_an_ssm_reads_a_cached_prompt_that_it_sat_out(models):
    def run_alone(prompts):
        return job(models[:2], {}, prompts=prompts, batched=False)

    silent = run_alone([PROMPTS[-1]] * 2)
    silent["mutation"] = "ssms_sit_out_the_first_request"
    once, second = engine.run([run_alone([PROMPTS[-1]]), silent])
    assert second["tokens"] == once["tokens"] * 2
    # All drafts are the second request's, whose prompt is in cached blocks.
    assert second["drafts"] == once["drafts"]
    assert second["accepted"] == once["accepted"] > 0
    assert second["cache_hits"] > 0


def test_tokens_proposed_twice_keep_the_joint_distribution(tmp_path):
    """One SSM as several sources: they agree as often as draws can."""
    models = distribution.models(tmp_path)
    ssm = models["ssm"]

    def job(rule, *sources, mutation=None):
        job = distribution.job(models, rule, 8_000, mutation=mutation)
        job["llm"]["speculative_config"] |= {
            "ssms": sources,
            "tree": [1, 1],
            "num_speculative_tokens": 3,
        }
        return job

    *right, wrong = engine.run(
        [
            job("mss", ssm, ssm, ssm),
            job("rrs", ssm, ssm, {"model": "suffix", "max_tokens": 64}),
            job("mss", ssm, ssm, ssm, mutation="duplicates_across_sources_dropped"),
        ]
    )
    expected = distribution.joint(models["target"], 1.0)
    for result in right:
        assert result["accepted"] > result["drafts"] / 3
        assert distribution.p_value(result, expected) > 1e-3
    assert distribution.p_value(wrong, expected) < 1e-4
