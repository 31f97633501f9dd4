"""Sampled texts have the target's joint distribution under MSS and RRS."""

import pytest

from tests.e2e import distribution, engine

DRAWS = 8_000
BOTH = ["ssm", "head"]
MUTATIONS = {
    # Rules that silently change the distribution, by the rule they spoil.
    "duplicates_dropped": "mss",
    "q_not_updated": "rrs",
    "likeliest_children": "mss",
    "only_kept_children": "mss",
    "shared_uniforms": "mss",
    "hopeless_trees_dropped": "mss",
}
# So that many draws are hopeless.
LEAST = {"hopeless_trees_dropped": 0.5}
# All but one are seen in half as many.
MUTATED_DRAWS = {name: DRAWS // 2 for name in MUTATIONS} | {"duplicates_dropped": DRAWS}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return distribution.models(tmp_path_factory.mktemp("models"))


def test_stochastic_rules_keep_the_joint_distribution(models):
    kinds = [("mss", ["ssm"]), ("rrs", ["ssm"]), ("mss", ["head"]), ("rrs", BOTH)]
    jobs = [
        distribution.job(models, rule, DRAWS, sources=sources)
        for rule, sources in kinds
    ]
    # What was drawn may be too unlikely to be verified.
    kinds.append(("mss", 0.5))
    jobs.append(distribution.job(models, "mss", DRAWS, min_probability=0.5))
    expected = distribution.joint(models["target"], 1.0)
    for kind, result in zip(kinds, engine.run(jobs), strict=True):
        assert result["accepted"] > result["drafts"] / 2, kind
        assert distribution.p_value(result, expected) > 1e-3, kind


def test_wrong_rules_fail_the_same_test(models):
    jobs = [
        distribution.job(
            models,
            rule,
            MUTATED_DRAWS[name],
            mutation=name,
            min_probability=LEAST.get(name),
        )
        for name, rule in MUTATIONS.items()
    ]
    expected = distribution.joint(models["target"], 1.0)
    for name, result in zip(MUTATIONS, engine.run(jobs), strict=True):
        assert distribution.p_value(result, expected) < 1e-4, name
