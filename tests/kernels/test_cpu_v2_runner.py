"""Plain decoding on V2 with the package's CPU kernels equals V1's."""

import json
import os
from unittest import mock

import plain_decoding
import pytest

from tests import processes

_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_PLUGINS": "",
}
DETERMINISTIC = (
    "greedy",
    "top_k_1",
    "tiny_top_p",
    "min_p_1",
    "penalties",
    "logit_bias",
    "allowed",
    "regex",
    "chunked",
    "bad_words",
    "min_tokens",
    "no_min_tokens",
    "logprobs",
    "prompt_logprobs",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("plain_decoding")
    plain_decoding.make_model(folder / "model")
    decoded = {}
    for runner in ("v1", "v2"):
        output = folder / f"{runner}.json"
        arguments = [runner, folder / "model", output]
        with mock.patch.dict(os.environ):
            os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
            processes.run(plain_decoding.main, arguments, folder / "log", **_ENV)
        decoded[runner] = json.loads(output.read_text())
    return decoded


def test_each_engine_ran_the_runner_under_test(results: dict[str, dict]) -> None:
    assert results["v1"]["runner"] == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
    assert results["v2"]["runner"] == "vllm.v1.worker.cpu.model_runner.CPUModelRunner"


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_v2_gives_the_tokens_of_v1(results: dict[str, dict], name: str) -> None:
    assert results["v2"][name]["tokens"] == results["v1"][name]["tokens"]
    assert results["v2"][name]["text"] == results["v1"][name]["text"]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_v2_gives_the_logprobs_of_v1(results: dict[str, dict], name: str) -> None:
    got, expected = results["v2"][name][name], results["v1"][name][name]
    assert len(got) == len(expected) > 0
    for step, reference in zip(got, expected, strict=True):
        assert [(token, rank) for token, _, rank in step] == [
            (token, rank) for token, _, rank in reference
        ]
        assert [value for _, value, _ in step] == pytest.approx(
            [value for _, value, _ in reference], abs=1e-4
        )


def test_a_seed_decides_the_sample(results: dict[str, dict]) -> None:
    v2 = results["v2"]
    assert v2["seeded"]["tokens"] == v2["seeded_again"]["tokens"]
    assert v2["seeded"]["tokens"] != v2["other_seed"]["tokens"]
