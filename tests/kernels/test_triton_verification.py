"""Device verification, run by Triton's interpreter, against its definitions."""

import numpy as np
import pytest
import torch
import verification_cases as cases
from interpreter import outputs_of

from vllm_specinfer.noise import uniform
from vllm_specinfer.tree.proposals import NO_DRAW, Draws
from vllm_specinfer.verify.stochastic import TEST_SALT, verify_draws
from vllm_specinfer.verify.walk import TreeWalk


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list, list]:
    return outputs_of(cases, tmp_path_factory.mktemp("outputs"))


def test_draws_are_tested_as_the_definition_says(outputs) -> None:
    assert cases.TEST_SALT == TEST_SALT
    num_accepted = num_rejected = 0
    for seed, (found, logits) in zip(cases.SEEDS, outputs[0], strict=True):
        case = cases.draw_case(seed)
        draws = Draws(case["places"], case["tokens"], case["q"])
        before = torch.from_numpy(case["logits"])
        p = before.double().softmax(-1).numpy()[case["rows"]]
        k = np.arange(draws.places.shape[1])
        keys = zip(case["seeds"].tolist(), case["positions"].tolist(), strict=True)
        uniforms = np.array([uniform(s, at + TEST_SALT, k) for s, at in keys])
        places, left = verify_draws(
            np.take_along_axis(p, draws.tokens, axis=1),
            draws,
            uniforms,
        )
        for g, row in enumerate(case["rows"]):
            if places[g] != NO_DRAW:
                num_accepted += 1
                assert found[g] == draws.tokens[g, places[g]]
                assert logits[row].equal(before[row])
                continue
            num_rejected += 1
            assert found[g] == -1
            known = draws.tokens[g] >= 0
            p[g, draws.tokens[g][known]] = left[g][known]
            after = logits[row].double().softmax(-1).numpy()
            assert after == pytest.approx(p[g] / p[g].sum(), abs=1e-6)
        others = np.setdiff1d(np.arange(len(before)), case["rows"])
        assert logits[others].equal(before[others])
    assert num_accepted > 15 and num_rejected > 15


def test_walks_follow_the_targets_tokens(outputs) -> None:
    deepest = 0
    for seed, (path, count, tokens) in zip(cases.SEEDS, outputs[1], strict=True):
        case = cases.tree_case(seed)
        for r, (first, rows, slot) in enumerate(
            zip(case["first"], case["num_rows"], case["slots"], strict=True)
        ):
            nodes = max(rows - 1, 0)
            walk = TreeWalk(case["tokens"][slot, :nodes], case["parents"][slot, :nodes])
            emitted = [target := int(case["targets"][first])]
            while walk.advance(target):
                emitted.append(target := int(case["targets"][first + walk.node + 1]))
            zeros = [0] * (path.shape[1] - len(walk.path))
            assert count[r] == len(walk.path)
            assert path[r].tolist() == walk.path + zeros
            assert tokens[r].tolist() == emitted + zeros
            deepest = max(deepest, len(walk.path))
    assert deepest > 4
