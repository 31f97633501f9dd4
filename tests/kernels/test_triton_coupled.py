"""Children chosen on the device, run by Triton's interpreter, are the definition's."""

import coupled_cases as cases
import numpy as np
import pytest
from interpreter import outputs_of

from vllm_specinfer.drafting.children import ChildChooser, DraftRows


def test_children_are_those_of_the_definition(tmp_path) -> None:
    check(outputs_of(cases, tmp_path))


def check(outputs: list) -> None:
    num_none = num_sampled = num_greedy = 0
    for seed, (scores, children) in zip(cases.SEEDS, outputs, strict=True):
        case = cases.case(seed)
        k, m = case["k"], case["tokens"].shape[1]
        requests = np.arange(len(scores)) // (len(scores) // len(case["seeds"]))
        rows = DraftRows(
            seeds=case["seeds"][requests],
            roots=case["positions"][requests],
            depths=np.full(len(scores), case["depth"]),
            nodes=np.zeros(len(scores), int),
            **{
                name: case[name][requests]
                for name in ("temperatures", "top_k", "top_p", "min_p")
            },
        )
        expected = ChildChooser("coupled").choose(
            case["logprobs"], case["tokens"], k, rows
        )
        found = scores.numpy()
        assert np.isneginf(found[:, m:]).all()
        real = np.isfinite(expected.scores)
        assert (np.isfinite(found[:, :m]) == real).all()
        assert found[:, :m][real] == pytest.approx(expected.scores[real], abs=1e-5)
        assert (children.numpy()[:, :m][real] == expected.tokens[real]).all()
        num_none += (~real).sum()
        num_sampled += (rows.temperatures > 0).sum()
        num_greedy += (rows.temperatures == 0).sum()
    assert min(num_none, num_sampled, num_greedy) > 5
