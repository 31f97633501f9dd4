"""An engine on CUDA's path: on a CPU, with the kernels interpreted.

`tests/e2e/device_guard.py` lets it fail where the package reads from the device beside
`vllm_specinfer/device.py`, or hands a kernel what a GPU could not see.
"""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.models import noisy_copy, tiny_llama, untrained_head

# Of a step: what was accepted, and what the step brought; of two SSMs new blocks, and
# drafts of four levels. Beside that the tests' invariants look at the blocks of both
# requests.
MOST_READS = 2 + 2 * 2 + 2


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict, dict]:
    folder: Path = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0)
    ssm = noisy_copy(target, folder / "ssm", noise=0.05)
    head = untrained_head(target, folder / "head")
    output = folder / "outputs.json"
    run = subprocess.run(
        [sys.executable, "-m", "tests.e2e.interpreted", target, ssm, head, output],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return tuple(json.loads(output.read_text()))


def test_texts_are_those_of_plain_decoding(outputs) -> None:
    of_cpu, found, _ = outputs
    plain = of_cpu["plain"]["tokens"]
    assert found["coupled"]["tokens"] == found["asynchronous"]["tokens"] == plain
    assert found["eagle"]["tokens"] == found["two"]["tokens"] == plain[:2]
    assert found["coupled"]["accepted"] > found["coupled"]["drafts"] > 5
    assert found["eagle"]["drafts"] > 5
    assert found["two"]["accepted"] > found["two"]["drafts"] > 5
    assert found["asynchronous"]["steps_in_flight"] == 2
    assert found["asynchronous"]["accepted"] == found["coupled"]["accepted"]


def test_trees_are_those_that_grow_on_a_cpu(outputs) -> None:
    of_cpu, found, _ = outputs
    for name in ("coupled", "two", "eagle"):
        for count in ("drafts", "drafted", "accepted", "accepted_per_pos"):
            assert found[name][count] == of_cpu[name][count]


def test_log_probabilities_are_those_of_plain_decoding(outputs) -> None:
    of_cpu, found, _ = outputs
    (plain,), (tree,) = of_cpu["plain"]["logprobs"][2], found["coupled"]["logprobs"][2]
    assert len(tree) == len(plain) == 20
    for row, expected in zip(tree, plain, strict=True):
        values, others = ({t: v for t, v, _ in r} for r in (row, expected))
        assert values == pytest.approx(others, abs=1e-3)


def test_draws_are_tested_as_on_a_cpu(outputs) -> None:
    of_cpu, found, _ = outputs
    assert found["mss"]["tokens"] == of_cpu["mss"]["tokens"]
    assert found["mss"]["tokens"] != of_cpu["sampled"]["tokens"]


def test_trees_are_attended_to_and_committed_by_the_kernels(outputs) -> None:
    launches = outputs[2]["launches"]
    assert launches["tree_attention"] > 60 and launches["commit_paths"] > 5


def test_a_step_waits_for_the_device_a_few_times(outputs) -> None:
    reads = outputs[2]["reads"]
    assert len(reads) > 30
    assert 3 <= max(reads) <= MOST_READS


def test_verification_waits_only_where_log_probabilities_are_asked_for(outputs) -> None:
    waits = collections.Counter(outputs[2]["waits"])
    assert waits.keys() == {0, 1}
    assert waits[0] > waits[1] > 5


def test_drafting_runs_in_graphs_but_for_prompts(outputs) -> None:
    passes = collections.Counter(outputs[2]["passes"])
    assert passes["graph"] > 100
    assert passes["level"] == 0
    assert 0 < passes["catch-up"] < 20  # the longer prompts


def test_all_blocks_are_given_back(outputs) -> None:
    for result in outputs[1].values():
        assert result["free_blocks"] == result["blocks"] - 1
