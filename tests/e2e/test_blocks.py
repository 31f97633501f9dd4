"""Where blocks are short, trees give up theirs before a request is preempted."""

import pytest

from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama
from tests.e2e.test_greedy import GREEDY, TREES, check, job, prompt

CONFIGS = {"best_first": {"num_speculative_tokens": 16}, "many": TREES["many_nodes"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0)
    return target, noisy_copy(target, folder / "ssm", noise=0.05)


def test_with_few_blocks_texts_are_plain_decodings_and_fewer_requests_are_preempted(
    models,
):
    prompts = [prompt(n, n) for n in (20, 35, 40, 50, 60, 64, 70, 80, 25, 33)]
    params = [{**GREEDY, "max_tokens": 120}]
    # Half of what eight requests want.
    few = {"num_gpu_blocks_override": 24, "enable_prefix_caching": True}
    jobs = [job(models, params=params, prompts=prompts)]
    for config in CONFIGS.values():
        tree = job(models, config, params, prompts, **few)
        jobs += [tree, {**tree, "mutation": "slots_are_kept"}]
    # What a tree held a smaller one after it gives back.
    uneven = job(models, CONFIGS["many"], params, prompts, **few)
    jobs.append({**uneven, "mutation": "trees_of_any_size"})
    plain, *trees, uneven = engine.run(jobs)
    for name, given, kept in zip(CONFIGS, trees[::2], trees[1::2], strict=True):
        check(plain, given)
        check(plain, kept)
        print(name, given["preemptions"], "preemptions instead of", kept["preemptions"])
        assert given["preemptions"] < kept["preemptions"]
        assert given["metrics"]["short_steps"] > 0 == kept["metrics"]["short_steps"]
        # Trees lose next to nothing, the engine has less to do.
        assert given["decode_steps"] < 1.05 * kept["decode_steps"]
        steps, steps_kept = (r["metrics"]["step_nodes"][0] for r in (given, kept))
        assert steps < steps_kept
    check(plain, uneven)
    print(uneven["metrics"]["returned_blocks"], "blocks given back")
    assert uneven["metrics"]["returned_blocks"] > 10
