"""Children drawn on the device, by Triton's interpreter, are the definition's."""

import drawn_cases as cases
import numpy as np
import pytest
from interpreter import outputs_of

from vllm_specinfer.drafting.children import ChildChooser, DraftRows
from vllm_specinfer.tree.proposals import NO_DRAW


def test_children_are_those_of_the_definition(tmp_path) -> None:
    check(outputs_of(cases, tmp_path))


def check(outputs: list) -> None:
    num_missing = num_repeated = num_sampled = num_greedy = 0
    for seed, (scores, children, places, q) in zip(cases.SEEDS, outputs, strict=True):
        case = cases.case(seed)
        requests = np.arange(len(scores)) // case["columns"].shape[1]
        names = ("seeds", "roots", "temperatures", "top_k", "top_p", "min_p")
        rows = DraftRows(
            depths=np.zeros(len(scores), int),
            nodes=case["columns"].flatten(),
            **{name: case[name][requests] for name in names},
        )
        chooser = ChildChooser("mss" if case["replaces"] else "rrs")
        m = case["tokens"].shape[1]
        expected = chooser.choose(case["logprobs"], case["tokens"], case["k"], rows)
        scores, children, places = (
            part.numpy()[:, :m] for part in (scores, children, places)
        )
        real = np.isfinite(expected.scores)
        assert (np.isfinite(scores) == real).all()
        assert scores[real] == pytest.approx(expected.scores[real], abs=1e-5)
        assert (children == expected.tokens).all()
        sampled = rows.temperatures > 0
        assert (places[~sampled] == NO_DRAW).all() and not q[~sampled].any()
        if sampled.any():
            drawn = expected.draws.places
            assert (places == drawn).all()
            assert q.numpy() == pytest.approx(expected.draws.q[:, 0], abs=1e-12)
            num_missing += (drawn[sampled] == NO_DRAW).sum()
            num_repeated += (~real & (drawn != NO_DRAW))[sampled].sum()
        num_sampled += sampled.sum()
        num_greedy += (~sampled).sum()
    assert min(num_missing, num_repeated, num_sampled, num_greedy) > 5
