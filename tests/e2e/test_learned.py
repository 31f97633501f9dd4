"""The learned scheduler in an engine: plain text, and what it learns is kept."""

import json

import numpy as np
import pytest

from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama
from tests.e2e.test_greedy import GREEDY, PROMPTS, check, job
from vllm_specinfer.scheduling.predictor import Predictor


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0)
    return target, noisy_copy(target, folder / "ssm", noise=0.05)


def test_learned_chances_leave_the_text_alone_and_are_kept(models, tmp_path):
    fitted = Predictor(3)
    fitted.weights[-1] = 0.25
    file = tmp_path / "predictor.json"
    file.write_text(json.dumps({"predictor": fitted.learned()}))
    params = [{**GREEDY, "temperature": 0.7 * (i % 2)} for i in range(len(PROMPTS))]
    params = [{**p, "seed": i} for i, p in enumerate(params)]
    sources = [models[1], "suffix"]

    def learned(scheduler="learned"):
        config = {"model": None, "ssms": sources, "scheduler": scheduler}
        run = job(models, config, params)
        return {**run, "mutation": "draft_and_save_every_step"}

    from_file = {"type": "learned", "file": str(file)}
    jobs = [
        {**job(models, None, params), "plain_v2": True},
        learned(),
        learned(),
        learned(from_file),
    ]
    results = engine.run(jobs, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    plain, first, second, third = results
    for result in (first, second, third):
        check(plain, result)
    states = [r["learned"]["predictors"] for r in results[1:]]
    for lookup, ssm in states:
        assert ssm["steps"] > 0 and lookup["size"] == 8
    # The second engine went on where the first one stopped.
    steps = [[predictor["steps"] for predictor in state] for state in states]
    assert steps[1][1] > 1.5 * steps[0][1]
    start = np.array(states[0][1]["weights"])
    moved = np.abs(np.array(states[1][1]["weights"]) - start).max()
    assert moved < np.abs(start - Predictor().weights).max()
    assert states[2][1]["size"] == 3 and states[2][1]["weights"][-1] != 0
