"""An engine on CUDA's path: on a CPU, with the kernels interpreted.

`tests/e2e/device_guard.py` lets it fail where the package reads from the device beside
`vllm_specinfer/device.py`, or hands a kernel what a GPU could not see.
"""

import collections
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from tests.e2e.models import (
    add_tokenizer,
    fit_head,
    noisy_copy,
    tiny_llama,
    tiny_model,
    tiny_vision_model,
    untrained_head,
)
from vllm_specinfer import compat
from vllm_specinfer.draft_vocab import DRAFT_VOCAB_FILE

RELEASE = compat.release(vllm.__version__)
# Of a step that the host drafts for: what was accepted, what the step brought, and of
# two SSMs their drafts.
MOST_WAITS = 2 + 2


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, ...]:
    folder: Path = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0, num_hidden_layers=1)
    ssm = noisy_copy(target, folder / "ssm", noise=0.12)
    head = untrained_head(target, folder / "head")
    windows = {"sliding_window": 64, "max_position_embeddings": 128}
    windowed = tiny_model("gemma2", seed=0, scale=2, **windows)
    windowed_ssm = tiny_model("mistral", seed=1, num_hidden_layers=1, **windows)
    fit_head(windowed_ssm, windowed)
    models = [target, ssm, head, str(folder / "windowed"), str(folder / "its-ssm")]
    windowed.save_pretrained(models[3])
    windowed_ssm.save_pretrained(models[4])
    vocab = json.dumps({"tokens": list(range(4, 96))})
    (folder / "its-ssm" / DRAFT_VOCAB_FILE).write_text(vocab)
    add_tokenizer(target, ssm)
    models.append(tiny_vision_model(folder / "vision", seed=0))
    output = folder / "outputs.json"
    run = subprocess.run(
        [sys.executable, "-m", "tests.e2e.interpreted", *models, output],
        env={**os.environ, "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return tuple(json.loads(output.read_text()))


def test_texts_are_those_of_plain_decoding(outputs) -> None:
    of_cpu, found, *_ = outputs
    plain = of_cpu["plain"]["tokens"]
    assert found["coupled"]["tokens"] == found["asynchronous"]["tokens"] == plain
    assert found["eagle"]["tokens"] == of_cpu["arriving"]["tokens"]
    assert found["windows"]["tokens"] == of_cpu["windows"]["tokens"]
    assert found["images"]["tokens"] == of_cpu["images"]["tokens"]
    assert found["two"]["tokens"] == plain[:1]
    for name in ("ahead", "small graphs", "eager"):
        assert found[name]["tokens"] == of_cpu["long"]["tokens"]
    assert found["back"]["tokens"] == of_cpu["back"]["tokens"]
    assert found["lookups"]["tokens"] == of_cpu["repeated"]["tokens"]
    assert found["coupled"]["accepted"] > found["coupled"]["drafts"] > 5
    assert found["eagle"]["drafts"] > 5
    assert found["windows"]["accepted"] > found["windows"]["drafts"] > 5
    assert found["two"]["accepted"] >= found["two"]["drafts"] > 2
    assert found["images"]["drafts"] > 5 < found["images"]["accepted"]
    for name in ("back", "small graphs", "eager"):
        assert found[name]["accepted"] > found[name]["drafts"] / 10 > 0.2, name
    assert found["asynchronous"]["steps_in_flight"] == 2
    assert found["asynchronous"]["accepted"] == found["coupled"]["accepted"]


def test_trees_are_those_that_grow_on_a_cpu(outputs) -> None:
    of_cpu, found, *_ = outputs
    others = {}
    for name in ("coupled", "two", "eagle", "resting", "pieces", "ahead", "lookups"):
        for count in ("drafts", "drafted", "accepted", "accepted_per_pos"):
            assert found[name][count] == of_cpu[name][count]
        # Beside them warm-up's, and those of requests that ended meanwhile.
        trees, first = found[name]["scores"].copy(), 0
        for parents, scores in of_cpu[name]["scores"]:
            place = trees.index([parents, pytest.approx(scores, abs=1e-3)], first)
            del trees[place]
            others[name] = trees
            # Where a request arrives later, a step has them in another order.
            first = 0 if name == "eagle" else place
    ahead, on_cpu = found["ahead"]["metrics"], of_cpu["ahead"]["metrics"]
    # The host knows who has ended, and has no tree for it; after the last one there is
    # no step that would count it.
    more = 0
    for ssm in ("ssm0", "ssm1"):
        assert ahead[f"drafted_nodes {ssm}"] >= on_cpu[f"drafted_nodes {ssm}"] > 3
        more += ahead[f"drafted_nodes {ssm}"] - on_cpu[f"drafted_nodes {ssm}"]
        assert ahead[f"accepted_tokens {ssm}"] == on_cpu[f"accepted_tokens {ssm}"] > 0
    assert more == sum(len(parents) for parents, _ in others["ahead"][:-1]) > 0


def test_texts_are_looked_up_where_the_host_does_not_know_them(outputs) -> None:
    of_cpu, found, *_ = outputs
    for name in ("suffix", "changing"):
        assert found[name]["tokens"] == 2 * of_cpu["known"]["tokens"]
        assert found[name]["metrics"]["drafted_nodes ssm0"] > 20
        assert found[name]["metrics"]["accepted_tokens suffix"] > 10
    assert outputs[2]["passes"].count("look-up") > 4


def test_lookups_alone_are_asked_ahead_in_every_step(outputs) -> None:
    of_cpu, found, _, counts, *_ = outputs
    metrics, steps = found["lookups"]["metrics"], counts["steps"]
    names = ["accepted_tokens ngram", "accepted_tokens suffix", "accepted_depth"]
    for name in [*names, "plain_request_steps no_candidates"]:
        assert metrics[name] == of_cpu["lookups"]["metrics"][name]
    assert metrics[names[0]] > 8 and metrics[names[1]] > 2
    assert all(step["launch"] == step.get("verify", 0) == 0 for step in steps)
    decoding = [step["ahead"] for step in steps if not step.get("prefills", True)]
    assert all(decoding) and len(decoding) > 8


def test_log_probabilities_are_those_of_plain_decoding(outputs) -> None:
    of_cpu, found, *_ = outputs
    of_plain, of_back = of_cpu["plain"]["logprobs"][2], of_cpu["back"]["logprobs"][1]
    pairs = [(of_back, found["back"]["logprobs"][1], 14)]
    for name in ("coupled", "asynchronous"):
        pairs.append((of_plain, found[name]["logprobs"][2], 20))
    for (plain,), (tree,), length in pairs:
        assert len(tree) == len(plain) == length
        for row, expected in zip(tree, plain, strict=True):
            values, others = ({t: v for t, v, _ in r} for r in (row, expected))
            assert values == pytest.approx(others, abs=1e-3)


def test_draws_are_tested_as_on_a_cpu(outputs) -> None:
    of_cpu, found, *_ = outputs
    drawn, likeliest = found["mss"]["tokens"]
    assert [drawn, likeliest] == of_cpu["mss"]["tokens"]
    plain_draw, plain_likeliest = of_cpu["tested"]["tokens"]
    assert drawn != plain_draw and likeliest == plain_likeliest
    assert found["rrs"]["tokens"] == of_cpu["rrs"]["tokens"]
    for name in ("mss", "rrs"):
        for count in ("drafts", "drafted", "accepted"):
            assert found[name][count] == of_cpu[name][count] > 0


def test_trees_are_attended_to_and_committed_by_the_kernels(outputs) -> None:
    launches = outputs[2]["launches"]
    assert launches["tree_attention"] > 60 and launches["commit_paths"] > 5


def test_nobody_waits_in_a_step_that_is_drafted_for_ahead(outputs) -> None:
    steps = [step for step in outputs[2]["steps"] if not step.get("made_up")]
    ahead = [step for step in steps if step["ahead"]]
    assert len(ahead) > 8 and sum(step["looks_up"] for step in ahead) > 4
    assert all(step["launch"] == 0 for step in ahead)
    # A step in which nothing is left to be run verifies nothing.
    assert all(step.get("verify", 0) == 0 for step in ahead)
    for kind in ("logprobs", "grammars", "tested"):
        assert sum(step.get(kind, False) for step in ahead) >= 8


def test_kernels_of_drafting_ahead_are_warmed_up(outputs) -> None:
    made_up = [step for step in outputs[2]["steps"] if step.get("made_up")]
    before, after = (
        [step for step in made_up if ("rows" in step) is graphs]
        for graphs in (False, True)
    )
    # Prompts and five steps behind them; from 0.33 on once more with greedy requests.
    prompts = [step["prefills"] for step in before]
    assert prompts == (1 + (RELEASE != "0.32")) * [True, *5 * [False]]
    assert [step["prefills"] for step in after] == prompts
    assert not any(step["ahead"] for step in before)
    assert all(step["ahead"] is not step["prefills"] for step in after)


def test_steps_after_prompts_are_drafted_for_ahead(outputs) -> None:
    steps = [step for step in outputs[2]["steps"] if "rows" in step]
    steps = [step for step in steps if step["asynchronous"] and not step["looks_up"]]
    after = [
        step["ahead"]
        for before, step in itertools.pairwise(steps)
        if before["prefills"]
    ]
    assert all(after) and len(after) > 12


def test_a_head_that_rests_lets_nobody_wait_until_it_is_asked_again(outputs) -> None:
    steps = [s for s in outputs[4]["steps"] if not s.get("prefills", True)][:10]
    # Two steps with trees, two without, and so on; the first tree after them waits.
    assert "".join("-A"[step["ahead"]] for step in steps) == "AA---A---A"
    assert "".join("-w"[step["launch"] > 0] for step in steps) == "----w---w-"


def test_a_head_that_rests_inside_a_prompt_goes_on_inside_it(outputs) -> None:
    steps = outputs[5]["steps"][:6]
    assert [step.get("prefills") for step in steps] == 3 * [True] + 3 * [False]
    # It sits out a piece and a token, and reads both with what follows; then it waits.
    assert "".join("-w"[step["launch"] > 0] for step in steps) == "--w--w"
    assert "".join("-A"[step["ahead"]] for step in steps) == "---A--"


def test_other_steps_wait_for_the_device_a_few_times(outputs) -> None:
    others = [step for step in outputs[2]["steps"] if not step["ahead"]]
    assert len(others) > 30
    assert 3 <= max(step["launch"] for step in others) <= MOST_WAITS
    if RELEASE != "0.32":
        # The second round waits for what the first one's last step has drafted ahead.
        others = [s for s in others if not (s.get("made_up") and "rows" in s)]
    assert all(step.get("verify", 0) == 0 for step in others)


def test_drafting_runs_in_graphs_but_for_prompts(outputs) -> None:
    passes = collections.Counter(outputs[2]["passes"])
    assert passes["graph"] > 100
    assert passes["level"] == 0
    assert 0 < passes["catch-up"] < 32  # the longer prompts


def test_verification_runs_in_full_graphs_whatever_the_trees(outputs) -> None:
    steps = [step for step in outputs[2]["steps"] if "rows" in step]
    decoding = [step["rows"] for step in steps if not step["prefills"]]
    assert outputs[2]["passes"].count("verification") == len(decoding) > 50
    # Of one and two requests, with all nodes, some, and none.
    assert set(decoding) >= {1, 2, 3, 9, 12, 18}


def test_prompts_run_in_graphs_of_pieces_where_these_are_asked_for(outputs) -> None:
    steps = [step for step in outputs[2]["steps"] if "rows" in step]
    prompts = [step["rows"] for step in steps if step["prefills"]]
    # Captures run them, too. A graph's rows are those of two full trees.
    assert outputs[2]["passes"].count("pieces") > len(prompts) > 20
    assert any(rows not in (14, 16, 18, 32) for rows in prompts)
    assert "verification" in outputs[6]["passes"]
    assert "pieces" not in outputs[6]["passes"]


def test_memory_is_profiled_with_the_rows_of_full_trees(outputs) -> None:
    # Of two requests, with trees of six, seven and eight nodes.
    assert {f"profile of {n} rows" for n in (14, 16, 18)} <= set(outputs[2]["passes"])


def test_all_blocks_are_given_back(outputs) -> None:
    for result in outputs[1].values():
        assert result["free_blocks"] == result["blocks"] - 1
