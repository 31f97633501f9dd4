"""What is laid over the rows of a step by kernels is what the host would lay."""

import numpy as np
import pytest
import step_rows_cases as cases
from interpreter import outputs_of


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list:
    return outputs_of(cases, tmp_path_factory.mktemp("outputs"))


def test_rows_positions_and_walked_trees_are_the_hosts(outputs) -> None:
    num_trees = 0
    for seed, (found, _) in zip(cases.SEEDS, outputs, strict=True):
        step = cases.Step(seed)
        plan = step.on_host()
        expected = cases.laid(step, plan)
        assert (found is None) == (expected is None)
        if found is None:
            continue
        num_trees += len(found["paths"])
        for key in ("is_tree", "context_lens", "positions"):
            assert found[key].equal(expected[key]), key
        assert found["rows"] == expected["rows"]
        assert found["all_tree"] == expected["all_tree"]
        # Of rows that are in no tree nobody reads the bits; behind them are others'.
        kept = np.append(np.repeat(plan.is_tree, np.diff(step.starts)), [True] * 5)
        assert found["bits"][kept].equal(expected["bits"][kept])
        walked, known = found["walked"], expected["walked"]
        assert walked["first"].equal(known["first"])
        assert walked["num_rows"].equal(known["num_rows"])
        for i in plan.tree_requests:
            nodes = slice(0, plan.num_rows[i] - 1)
            slot, row = walked["slots"][i], known["slots"][i]
            for key in ("tokens", "parents"):
                assert walked[key][slot, nodes].equal(known[key][row, nodes])
        ends = [[path[-1:] for path in paths] for paths in expected["paths"]]
        assert ends == found["paths"]
    assert num_trees > 60


def test_rows_of_requests_that_were_not_drafted_for_are_no_tree(outputs) -> None:
    num_trees = 0
    for seed, (drafted, found) in zip(cases.SEEDS, outputs, strict=True):
        step = cases.Step(seed)
        if drafted is None or found is None:
            continue
        num_trees += bool(drafted["is_tree"][0])
        assert not found["is_tree"][0] and found["rows"][0] == 0
        assert found["is_tree"][1:].equal(drafted["is_tree"][1:])
        first, end = step.starts[:2]
        flat = step.computed[step.slots[0]] + np.arange(end - first)
        assert found["positions"][first:end].tolist() == flat.tolist()
        assert found["positions"][end:].equal(drafted["positions"][end:])
    assert num_trees > 5
