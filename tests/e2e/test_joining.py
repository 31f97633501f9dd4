"""How requests join a step, and sessions that go on after an answer has ended."""

import asyncio

import pytest
import vllm

from tests import processes
from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama
from tests.e2e.test_greedy import GREEDY, check, job, prompt
from tests.e2e.test_sampling import SAMPLED
from vllm_specinfer import compat

LENGTHS = (3, 5, 10)
TURNS = [prompt(length, length) for length in (20, 25, 40)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0, scale=3)
    return target, noisy_copy(target, folder / "ssm", noise=0.02)


def test_a_request_that_joins_by_one_token(models):
    """vLLM gives it rows for a whole tree, which a threshold may not let through."""
    prompts = [prompt(20, 1), prompt(9, 2), prompt(1, 3)]
    params = [{**GREEDY, "max_tokens": n} for n in (40, 4, 20)]
    few = {"max_num_seqs": 2, "long_prefill_token_threshold": 7}
    plain, tree = engine.run(
        [job(models, c, params, prompts, **few) for c in (None, {})]
    )
    check(plain, tree)


def test_a_request_whose_prompt_is_known_but_for_one_token(models):
    """vLLM never lets it in where a step has less room than a tree has rows."""
    config = {"tree": {"max_depth": 8, "max_width": 8}, "num_speculative_tokens": 64}
    # From 0.33 on vLLM refuses to start with less room than that.
    rows = 64 if compat.release(vllm.__version__) == "0.32" else 65
    little = {"max_num_batched_tokens": rows, "enable_chunked_prefill": True}
    prompts = 2 * [prompt(65, 1)]
    plain, tree = engine.run(
        [job(models, c, None, prompts, False, **little) for c in (None, config)],
        timeout=120,
    )
    check(plain, tree)


async def _talk(llm: object, name: str, params: dict) -> list[list[int]]:
    """The answers of a session whose turns come one after the other."""
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    params = engine._params(params)
    params.output_kind = RequestOutputKind.DELTA
    answered, answers = asyncio.Event(), []

    async def turns():
        for turn in TURNS:
            answered.clear()
            answers.append([])
            text = {"prompt_token_ids": turn.copy(), "type": "token"}  # it grows
            yield StreamingInput(prompt=text)
            await answered.wait()

    async for output in llm.generate(turns(), params, name):
        answers[-1] += output.outputs[0].token_ids
        if len(answers[-1]) >= params.max_tokens:
            answered.set()
    return answers


async def _sessions(job: dict) -> list[list[list[int]]]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["llm"]))
    try:
        return [
            await asyncio.wait_for(_talk(llm, str(i), params), 60)
            for i, params in enumerate(job["params"])
        ]
    finally:
        llm.shutdown()


def _all_sessions(jobs: list[dict]) -> tuple[list[list[list[list[int]]]], float]:
    """The answers of each job's sessions, and how many nodes were accepted in all."""
    from prometheus_client import REGISTRY

    processes.hasten_starts()
    with processes.forked_processes():
        answers = [asyncio.run(_sessions(job)) for job in jobs]
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    samples = [s for family in REGISTRY.collect() for s in family.samples]
    return answers, sum(s.value for s in samples if s.name == accepted)


def test_sessions_go_on_where_an_answer_has_ended_inside_a_path(models):
    params = [{**kind, "max_tokens": n} for kind in (GREEDY, SAMPLED) for n in LENGTHS]
    # Decoding plainly on Model Runner V2, as seeded texts must.
    never = {"num_speculative_tokens_per_batch_size": [[1, 1024, 0]]}
    memory = {"kv_cache_memory_bytes": engine.KV_BYTES}
    (greedy, plain, tree), num_accepted = processes.call(
        _all_sessions,
        [
            job(models, None, params[: len(LENGTHS)], **memory),
            *(job(models, config, params, **memory) for config in (never, {})),
        ],
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )
    assert tree == plain and tree[: len(LENGTHS)] == greedy and num_accepted > 10
    assert all(len(answers) == len(TURNS) for answers in plain)
