"""Lookups on the device, run by Triton's interpreter, against the host's."""

import lookup_cases as cases
import numpy as np
import pytest
from interpreter import outputs_of

from vllm_specinfer.drafting.lookup import chance_after
from vllm_specinfer.drafting.suffix import PAST_TRUST


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list, list, list, dict]:
    return outputs_of(cases, tmp_path_factory.mktemp("outputs"))


def test_the_device_finds_what_the_host_finds(outputs) -> None:
    assert len(outputs[0]) == 2 * 16 * len(cases.SEEDS)
    for found, expected in outputs[0]:
        assert found == pytest.approx(expected, abs=1e-5)
    sizes = [len(expected) for _, expected in outputs[0]]
    assert min(sizes) == 0 and max(sizes) == 20


def test_the_device_finds_what_random_texts_seldom_have(outputs) -> None:
    for name, (found, expected) in outputs[3].items():
        assert expected and found == pytest.approx(expected, abs=1e-5), name


def test_texts_that_ended_count_against_those_that_went_on(outputs) -> None:
    chance = PAST_TRUST * chance_after(3) / 2
    both, *_, both_again = outputs[1]
    assert both == both_again == {(4,): pytest.approx(np.log(chance))}


def test_forgotten_texts_come_back_where_they_are_looked_up_in_again(outputs) -> None:
    _, neither, second, _ = outputs[1]
    assert neither == {}
    assert second == {(4,): pytest.approx(np.log(PAST_TRUST * chance_after(3)))}


def test_n_grams_are_the_hosts(outputs) -> None:
    assert len(outputs[2]) == 3 * len(cases.LENGTHS) * len(cases.SEEDS)
    for found, expected in outputs[2]:
        assert len(found) == len(expected)
        for node, other in zip(found, expected, strict=True):
            assert node == pytest.approx(other, abs=1e-5)
    sizes = [len(expected) for _, expected in outputs[2]]
    assert min(sizes) == 0 and max(sizes) == 8
    assert sum(size > 0 for size in sizes) > len(sizes) // 3
