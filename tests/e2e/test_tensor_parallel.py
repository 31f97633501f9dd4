"""Two ranks: the text is that of one, and both ranks verify and draft the same."""

import hashlib
import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.e2e import engine
from tests.e2e.models import VOCAB, noisy_copy, tiny_llama
from vllm_specinfer.draft_vocab import DRAFT_VOCAB_FILE
from vllm_specinfer.evidence.bench import BenchSettings, measure
from vllm_specinfer.evidence.measured import Measured
from vllm_specinfer.options import METHOD

PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(9 + 8 * i)] for i in range(6)]
PARAMS = [
    {"temperature": 0.9 * (i % 2), "seed": i, "max_tokens": 40, "ignore_eos": True}
    for i in range(len(PROMPTS))
]


def state_of(worker) -> tuple[str, ...]:
    """Digests of all texts and trees that a rank remembers, and of its SSM's head; what
    it has learned."""
    runner = worker.model_runner
    trees, sources = runner.speculator._trees, runner.speculator.sources
    budget = runner.speculator.budget
    arrays = (
        runner.req_states.all_token_ids.gpu.numpy(),
        *(trees.parents, trees.depths, trees.root_positions),
        sources.ssms[0].ssm.head._rows.float().numpy(),
        *([budget._profile.value] if budget.learns else []),
    )
    digests = (hashlib.sha256(array.tobytes()).hexdigest() for array in arrays)
    return *digests, json.dumps(sources.experience.learned())


def on_two_ranks(
    llm: dict,
) -> tuple[list[list[int]], list[tuple[str, ...]], Measured]:
    """The texts, each rank's state after them, and what is measured afterwards."""
    import torch
    from vllm import LLM, SamplingParams

    processes.hasten_starts()
    # vLLM compiles a helper of its embedding, in each rank anew.
    not_compiled = torch._dynamo.config.patch(disable=True)
    with not_compiled, processes.forked_processes():
        two = LLM(
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            disable_log_stats=False,
            **llm,
        )
        outputs = two.generate(
            [{"prompt_token_ids": ids} for ids in PROMPTS],
            [SamplingParams(detokenize=False, **params) for params in PARAMS],
            use_tqdm=False,
        )
        states = two.collective_rpc(state_of)
        config = {METHOD: llm["speculative_config"]}
        settings = BenchSettings("", config, [""], batches=[2], max_tokens=16)
        ((_, measured),) = measure(settings, {METHOD: two}, {"": PROMPTS}, "")
    texts = [list(o.outputs[0].token_ids) for o in outputs]
    return texts, states, measured[METHOD]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder: Path = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0)
    ssm = noisy_copy(target, folder / "ssm", noise=0.05)
    vocab = json.dumps({"tokens": list(range(1, VOCAB))})
    (Path(ssm) / DRAFT_VOCAB_FILE).write_text(vocab)
    config = {"method": "specinfer", "ssms": [ssm, "suffix"]}
    return {
        "model": target,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 256,
        # Fewer than there are prompts: slots are used again.
        "max_num_seqs": 4,
        "enforce_eager": True,
        "block_size": 32,
        "num_gpu_blocks_override": 400,
        "kv_cache_memory_bytes": engine.KV_BYTES,
        "speculative_config": config,
    }


@pytest.fixture(scope="module")
def plain(llm) -> list[list[int]]:
    job = {"prompts": PROMPTS, "params": PARAMS, "plain_v2": True}
    (result,) = engine.run([{"llm": {**llm, "speculative_config": None}, **job}])
    return [texts[0] for texts in result["tokens"]]


@pytest.mark.parametrize(
    ("rule", "scheduler"),
    [("coupled", "static"), ("coupled", "auto"), ("mss", "auto")],
)
def test_two_ranks_agree_with_each_other_and_with_plain_decoding(
    llm, plain, rule, scheduler
):
    config = {**llm["speculative_config"], "verification": rule}
    config["scheduler"] = scheduler
    # Ranks that part wait for each other.
    texts, (first, second), measured = processes.call(
        on_two_ranks, {**llm, "speculative_config": config}, timeout=300
    )
    assert first == second
    for params, text, expected in zip(PARAMS, texts, plain, strict=True):
        if rule == "coupled" or not params["temperature"]:
            assert text == expected
    assert rule == "coupled" or texts != plain
    # Every rank has a clock, the budget of all goes by the first one's.
    costs = json.loads(first[-1])["budget"]
    assert bool(costs) == ((rule, scheduler) == ("coupled", "auto"))
    if costs:
        assert sum(values[0] for values in costs["step"]["values"]) > 0
        return  # as many nodes as pay, perhaps none
    # `reproduce tp` looks into such engines: greedy, with the steps of both sources.
    for params, text, expected in zip(PARAMS, measured.texts, plain, strict=True):
        assert params["temperature"] or text == expected[:16]
    assert measured.tokens_per_step > 1.2
    accepted = sum(measured.by_source.values())
    assert measured.tokens_per_step == pytest.approx(1 + accepted)


def test_ranks_with_other_clocks_draft_alike_ahead_of_the_host(
    tmp_path: Path,
) -> None:
    """On CUDA's path, where only the first rank sends outputs."""
    target = tiny_llama(tmp_path / "target", seed=0)
    ssm = noisy_copy(target, tmp_path / "ssm", noise=0.05)
    output, log = tmp_path / "output.json", tmp_path / "log"
    with log.open("w") as file:
        run = psutil.Popen(
            [sys.executable, "-m", "tests.e2e.interpreted_ranks", target, ssm, output],
            env={**os.environ, "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"},
            cwd=Path(__file__).parents[2],
            stdout=file,
            stderr=file,
        )
        try:
            # Ranks that part wait for each other.
            assert run.wait(300) == 0, log.read_text()[-5000:]
        except BaseException:
            processes.kill_children(run)
            run.kill()
            raise
    expected, texts, (first, second) = json.loads(output.read_text())
    assert texts == expected
    assert first["digests"] == second["digests"]
    assert first["learned"] == second["learned"]
    assert sum(v[0] for v in first["learned"]["budget"]["step"]["values"]) > 0
    rows = [[step.get("rows") for step in r["steps"]] for r in (first, second)]
    assert rows[0] == rows[1]
    ahead = [step for step in first["steps"] if step["ahead"]]
    assert len(ahead) > 10
    # Another rank reads what has long been there.
    assert all(not step["launch"] and not step.get("verify") for step in ahead)
