"""The learned scheduler in an engine: plain text, and what it learns is kept."""

import json
import shutil

import numpy as np
import pytest

from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama
from tests.e2e.test_greedy import GREEDY, PROMPTS, check, job
from vllm_specinfer.cache import cache_folder
from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.scheduling.predictor import Predictor

# Tokens of an engine that is to learn little.
FEW = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0)
    return target, noisy_copy(target, folder / "ssm", noise=0.05)


def test_learned_chances_leave_the_text_alone_and_are_kept(models, tmp_path):
    fitted = Predictor(3)
    fitted.weights[-1] = 1.0
    file = tmp_path / "predictor.json"
    # Of so many steps, the next ones move it little.
    file.write_text(json.dumps({"predictor": fitted.learned() | {"steps": 1000}}))
    params = [{**GREEDY, "temperature": 0.7 * (i % 2)} for i in range(len(PROMPTS))]
    params = [{**p, "seed": i} for i, p in enumerate(params)]
    few = [{**params[0], "max_tokens": FEW}]
    sources = [models[1], "suffix"]

    def learned(params, prompts=PROMPTS, scheduler="learned"):
        config = {"model": None, "ssms": sources, "scheduler": scheduler}
        run = job(models, config, params, prompts)
        return {**run, "mutation": "draft_and_save_every_step"}

    from_file = {"type": "learned", "file": str(file)}
    jobs = [
        {**job(models, None, params), "plain_v2": True},
        learned(params),
        learned(few, PROMPTS[:1]),
        learned(few, PROMPTS[:1], from_file),
    ]
    # The kernels are built, but nothing is learned.
    extension.load()
    cache = tmp_path / "cache" / cache_folder().name
    ignored = shutil.ignore_patterns("budget-*")
    shutil.copytree(cache_folder(), cache, ignore=ignored)
    results = engine.run(jobs, VLLM_CACHE_ROOT=str(cache.parent))
    plain, first, second, third = results
    check(plain, first)
    for result in (second, third):
        check({**plain, "tokens": [[plain["tokens"][0][0][:FEW]]]}, result)
    (lookup, ssm), (_, next_ssm), (_, ssm_of_file) = (
        r["learned"]["predictors"] for r in results[1:]
    )
    assert lookup["size"] == ssm["size"] == 8
    # The second engine went on where the first one stopped.
    assert 0 < ssm["steps"] < next_ssm["steps"] < 1.2 * ssm["steps"]
    at_first, then = np.array(ssm["weights"]), np.array(next_ssm["weights"])
    moved = np.abs(then - at_first).max()
    assert 0 < moved < 0.3 * np.abs(at_first - Predictor().weights).max()
    assert ssm_of_file["size"] == 3 and ssm_of_file["steps"] > 1000
    assert ssm_of_file["weights"][-1] > 0.5
