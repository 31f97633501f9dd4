"""Sampled text, logprobs and every sampling parameter: the same with and without trees.

The comparison is with plain decoding on the same model runner, whose noise depends on
seed, position and token alone; a tree's rows are drawn with the very same noise.
"""

import pytest

from tests.e2e import engine
from tests.e2e.models import VOCAB, add_tokenizer, noisy_copy, tiny_llama
from tests.e2e.test_greedy import PROMPTS, TREES, job

SAMPLED = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "seed": 5}
GREEDY = {**SAMPLED, "temperature": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    # Flat enough that temperature 1 does not always draw the best token.
    target = tiny_llama(folder / "target", seed=0, scale=3)
    return target, noisy_copy(target, folder / "ssm", noise=0.05)


def plain(models, params, prompts=None, **llm):
    return {**job(models, None, params, prompts, **llm), "plain_v2": True}


def test_seeded_samples_are_those_of_plain_decoding_for_every_tree(models):
    params = [{**SAMPLED, "seed": 100 + i} for i in range(len(PROMPTS))]
    naive = {"verification": "naive"}
    configs = {**TREES, "naive": naive, "naive, wide": {**naive, **TREES["wide"]}}
    trees = [job(models, config, params) for config in configs.values()]
    trees.append(job(models, {}, params, batched=False))
    expected, greedy, *trees = engine.run(
        [plain(models, params), plain(models, [GREEDY]), *trees]
    )
    assert expected["tokens"] != greedy["tokens"]
    for name, tree in zip([*configs, "batch 1"], trees, strict=True):
        print(name, 1 + tree["accepted"] / tree["drafts"], "tokens per step")
        assert tree["tokens"] == expected["tokens"], name
        # Draws of the SSM's own are seldom the target's.
        least = 50 if "naive" in name else 4
        assert tree["accepted"] > tree["drafts"] / least, name


PARAMETERS = {
    "low temperature": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.5},
    "greedy repetition": {"temperature": 0, "repetition_penalty": 1.5},
    "presence and frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {i: 2.0 for i in range(0, VOCAB, 3)}},
    "allowed": {"allowed_token_ids": list(range(0, VOCAB, 2))},
    "stop after minimum": {
        "min_tokens": 12,
        "stop_token_ids": list(range(0, VOCAB, 4)),
    },
    "logprobs": {"logprobs": 3},
    "greedy logprobs": {"temperature": 0, "logprobs": 0},
    "prompt logprobs": {"logprobs": 1, "prompt_logprobs": 1},
    "logprobs of tokens": {"logprob_token_ids": [7, 3, 90], "logprobs": 3},
    "all logprobs": {"logprobs": -1},
    "several": {"n": 3},
    "all": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "logprobs": 2,
    },
}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_every_sampling_parameter_is_served_as_without_trees(models, mode):
    params = [{**SAMPLED, **extra} for extra in PARAMETERS.values()]
    prompts = [PROMPTS[3 + i % 4] for i in range(len(params))]
    llm = {"logprobs_mode": mode, "max_num_seqs": 5, "max_logprobs": -1}
    expected, tree, wide = engine.run(
        [
            plain(models, params, prompts, **llm),
            job(models, {}, params, prompts, **llm),
            job(models, TREES["wide"], params, prompts, **llm),
        ]
    )
    for got in (tree, wide):
        assert got["accepted"] > got["drafts"] / 4
        for i, name in enumerate(PARAMETERS):
            assert got["tokens"][i] == expected["tokens"][i], name
            for ours, theirs in zip(
                got["logprobs"][i], expected["logprobs"][i], strict=True
            ):
                assert (ours is None) == (theirs is None), name
                same_logprobs(ours, theirs)
            same_logprobs(got["prompt_logprobs"][i], expected["prompt_logprobs"][i])
    asked = [i for i, p in enumerate(PARAMETERS.values()) if "prompt_logprobs" in p]
    assert all(expected["prompt_logprobs"][i] for i in asked)


def same_logprobs(ours, theirs):
    assert (ours is None) == (theirs is None)
    for a, b in zip(ours or [], theirs or [], strict=True):
        assert [(t, r) for t, _, r in a] == [(t, r) for t, _, r in b]
        assert [p for _, p, _ in a] == pytest.approx([p for _, p, _ in b], abs=1e-3)


# Every other request is greedy.
DRAWN = [
    {**(SAMPLED, GREEDY)[i % 2], "logprobs": 0, "seed": i} for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def undrawn(models) -> dict:
    return engine.run([plain(models, DRAWN)])[0]


@pytest.mark.parametrize("rule", ["mss", "rrs"])
def test_drawn_trees_repeat_and_report_the_targets_log_probabilities(
    models, undrawn, rule
):
    config = {"verification": rule}
    tree, again, repeated = engine.run(
        [
            job(models, config, DRAWN),
            job(models, {**config, **TREES["wide"]}, DRAWN, batched=False),
            job(models, config, DRAWN, batched=False),
        ]
    )
    # What was generated, read as a prompt by plain vLLM.
    found = tree["tokens"] + again["tokens"]
    texts = [a + b for a, (b,) in zip(PROMPTS * 2, found, strict=True)]
    score = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    (scores,) = engine.run([plain(models, [score], texts)])
    scored = iter(scores["prompt_logprobs"])
    for got in (tree, again):
        assert got["tokens"][1::2] == undrawn["tokens"][1::2]  # the greedy ones
        assert got["tokens"][0::2] != undrawn["tokens"][0::2]
        assert got["accepted"] > got["drafts"] / 4
        for prompt, (logprobs,) in zip(PROMPTS, got["logprobs"], strict=True):
            same_logprobs(logprobs, next(scored)[len(prompt) :])
    assert repeated["tokens"] == tree["tokens"]


@pytest.fixture(scope="module")
def constrained(models) -> tuple[dict, list[dict], dict]:
    """Arguments of engines, constraints, and what plain decoding writes under them."""
    add_tokenizer(*models)
    llm = {
        "skip_tokenizer_init": False,
        "logits_processors": ["tests.e2e.processors:TwoBack"],
    }
    (free,) = engine.run([plain(models, [GREEDY], PROMPTS[3:], **llm)])
    text = "".join(chr(32 + token) for token in free["tokens"][0][0])
    constraints = [
        {"bad_words": [text[1:3], text[7:9], text[10:13]]},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.7},
        {"structured_outputs": {"regex": "([a-f]{2,5}-[0-9]{1,4} ){6,9}"}},
        {"extra_args": {"two_back": 4.0}},
    ]
    params = [{**GREEDY, **c} for c in constraints]
    (expected,) = engine.run([plain(models, params, PROMPTS[3:], **llm)])
    for found, without, constraint in zip(
        expected["tokens"], free["tokens"], constraints, strict=True
    ):
        assert found != without, constraint
    return llm, constraints, expected


@pytest.mark.parametrize("rule", ["mss", "rrs"])
def test_draws_are_tested_behind_the_path_that_rows_look_back_on(
    models, constrained, rule
):
    """Where but one token can be drawn, the text is known: the greedy one's."""
    llm, constraints, expected = constrained
    params = [{**SAMPLED, "top_k": 1, **c} for c in constraints]
    tree, wide = (
        job(models, {"verification": rule, **shape}, params, PROMPTS[3:], **llm)
        for shape in ({}, TREES["wide"])
    )
    *trees, wrong = engine.run([tree, wide, {**wide, "mutation": "look_back"}])
    for tree in trees:
        assert tree["tokens"] == expected["tokens"]
        assert tree["accepted"] > tree["drafts"] / 20
    # The three that no grammar holds to their text and no processor pushes.
    for i in range(3):
        assert wrong["tokens"][i] != expected["tokens"][i], constraints[i]


def test_thinking_budgets_end_on_the_path_of_each_row(models):
    add_tokenizer(*models)
    llm = {
        "skip_tokenizer_init": False,
        "reasoning_config": {"reasoning_start_str": "!", "reasoning_end_str": "#$"},
    }
    kinds = [
        {**kind, "seed": i, **budget}
        for kind in (GREEDY, SAMPLED)
        for i, budget in enumerate(
            [{}, *({"thinking_token_budget": n} for n in (0, 1, 3, 9, 30))]
        )
    ]
    thinking = [*PROMPTS[3], 1]
    prompts = [thinking] * len(kinds)
    expected, *trees, wrong = engine.run(
        [
            plain(models, kinds, prompts, **llm),
            job(models, {}, kinds, prompts, **llm),
            job(models, TREES["wide"], kinds, prompts, **llm),
            {
                **job(models, TREES["wide"], kinds, prompts, **llm),
                "mutation": "look_back",
            },
        ]
    )
    for tree in trees:
        assert tree["tokens"] == expected["tokens"]
        assert tree["accepted"] > tree["drafts"] / 10
    assert wrong["tokens"] != expected["tokens"]
    for params, (tokens,) in zip(kinds, expected["tokens"], strict=True):
        if (budget := params.get("thinking_token_budget")) is not None:
            assert tokens[budget : budget + 2] == [3, 4], budget


def test_the_equality_tests_see_each_wrong_rule(models):
    """Processors without their path, noise without its position, flat positions."""
    params = [{**SAMPLED, "repetition_penalty": 1.5, "seed": i} for i in range(8)]
    mutations = ("look_back", "noise", "position", "bonus")
    expected, tree, *mutants = engine.run(
        [
            plain(models, params),
            job(models, TREES["wide"], params),
            *(
                {**job(models, TREES["wide"], params), "mutation": name}
                for name in mutations
            ),
        ]
    )
    assert tree["tokens"] == expected["tokens"]
    for name, mutant in zip(mutations, mutants, strict=True):
        assert mutant["tokens"] != expected["tokens"], name


def test_custom_logits_processors_see_each_nodes_path(models):
    processors = {"logits_processors": ["tests.e2e.processors:TwoBack"]}
    params = [
        {**kind, "seed": i, "extra_args": {"two_back": strength}}
        for i, (kind, strength) in enumerate(
            [(SAMPLED, 2.0), (GREEDY, 2.0), (SAMPLED, 0.0), (GREEDY, 4.0)] * 2
        )
    ]
    free, expected, tree, wide, wrong = engine.run(
        [
            plain(models, params),
            plain(models, params, **processors),
            job(models, {}, params, **processors),
            job(models, TREES["wide"], params, **processors),
            {
                **job(models, TREES["wide"], params, **processors),
                "mutation": "look_back",
            },
        ]
    )
    assert tree["tokens"] == wide["tokens"] == expected["tokens"]
    assert expected["tokens"] != free["tokens"]
    assert wrong["tokens"] != expected["tokens"]
    assert tree["accepted"] > tree["drafts"] / 10


def test_bad_words_and_stop_strings_are_served_as_without_trees(models):
    add_tokenizer(*models)
    llm = {"skip_tokenizer_init": False}
    kinds = [SAMPLED, GREEDY] * 3
    prompts = [PROMPTS[3]] * len(kinds)
    (free,) = engine.run([plain(models, kinds, prompts, **llm)])
    texts = ["".join(chr(32 + t) for t in tokens[0]) for tokens in free["tokens"]]
    # What these requests would have written: pairs, triples, and a stop in the middle.
    extras = [
        {"bad_words": [texts[0][1:3], texts[0][10:13], texts[0][20]]},
        {"bad_words": [texts[1][1:3], texts[1][10:13], texts[1][20]]},
        {"stop": [texts[2][15:17]], "include_stop_str_in_output": True},
        {"stop": [texts[3][15:17]]},
        {"stop": ["never"]},
        {"stop": ["never"]},
    ]
    params = [{**kind, **extra} for kind, extra in zip(kinds, extras, strict=True)]
    expected, tree = engine.run(
        [
            plain(models, params, prompts, **llm),
            job(models, {}, params, prompts, **llm),
        ]
    )
    assert tree["tokens"] == expected["tokens"]
    assert tree["accepted"] > 0
    assert tree["tokens"][0] != free["tokens"][0]
    assert tree["tokens"][1] != free["tokens"][1]
    assert len(tree["tokens"][2][0]) < SAMPLED["max_tokens"]
