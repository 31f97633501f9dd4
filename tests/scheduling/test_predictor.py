"""The learned chances: they begin as the source's own and follow what happens."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_specinfer.drafting.experience import Experience
from vllm_specinfer.scheduling.budget import Budget
from vllm_specinfer.scheduling.calibration import Calibration
from vllm_specinfer.scheduling.predictor import (
    FEATURES,
    MAX_SIZE,
    OWN,
    RECENT,
    Guesses,
    Predictor,
    node_features,
    read_predictor,
)


def some_features(count, seed=0):
    """Features of nodes as they may be."""
    rng = np.random.default_rng(seed)
    return node_features(
        own=np.log(rng.uniform(0.01, 0.99, count)),
        above=-rng.exponential(2, count),
        rank=rng.integers(0, 4, count),
        depth=rng.integers(1, 5, count),
        temperature=rng.choice([0.0, 1.0], count),
        recent=rng.uniform(0, 1, count),
    )


def random_predictor(size, seed=0):
    predictor = Predictor(size)
    rng = np.random.default_rng(seed)
    predictor.weights = rng.standard_normal(len(predictor.weights)) / 2
    return predictor


@pytest.mark.parametrize("size", [0, 8])
def test_nothing_learned_leaves_the_sources_own_chances(size):
    features = some_features(50).reshape(10, 5, -1)
    features[3, 2, OWN] = -np.inf
    logs = Predictor(size).corrected(features)
    np.testing.assert_allclose(logs, features[..., OWN], rtol=1e-9)
    # What was no node stays none, whatever was learned; no chance exceeds 1.
    logs = random_predictor(size).corrected(features)
    assert np.isneginf(logs[3, 2]) and np.isfinite(logs).sum() == 49
    assert (logs <= 0).all()
    sure = features.copy()
    sure[..., OWN] = 0.0
    assert np.isfinite(random_predictor(size).corrected(sure)).all()


@pytest.mark.parametrize("size", [0, 5])
def test_the_gradient_is_that_of_the_loss(size):
    predictor = random_predictor(size)
    features, right = some_features(40), np.random.default_rng(1).random(40) < 0.4
    # The function of the module's head, written once more in torch.
    weights = torch.tensor(predictor.weights, requires_grad=True)
    n = len(FEATURES)
    direct, offset, inner, bias, outer = weights.split([n, 1, n * size, size, size])
    own = torch.logit(torch.tensor(np.exp(features[:, OWN])))
    x = torch.tensor(features)
    x[:, 0], x[:, 1] = own, x[:, 1].clamp(min=-8)
    middle = torch.tensor([0.0, -1.0, 1.0, 2.0, 0.5, 0.5])
    x = (x - middle) / torch.tensor([4.0, 3.0, 2.0, 2.0, 1.0, 0.3])
    hidden = torch.tanh(x @ inner.reshape(n, size) + bias)
    logits = own + x @ direct + offset + hidden @ outer
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, torch.tensor(right, dtype=torch.float64), reduction="sum"
    )
    loss.backward()
    found = predictor.gradient(features, right)
    np.testing.assert_allclose(found, weights.grad.numpy(), rtol=1e-6, atol=1e-9)
    logs = torch.nn.functional.logsigmoid(logits).detach().numpy()
    np.testing.assert_allclose(predictor.corrected(features), logs, rtol=1e-6)


def test_online_it_finds_what_one_number_cannot():
    """Nodes are right by the request's recent guesses, not by what the source says."""
    predictor, calibration = Predictor(), Calibration()
    rng = np.random.default_rng(0)
    losses = {"predictor": [], "calibration": []}
    for _ in range(3000):
        features = some_features(6, int(rng.integers(1 << 30)))
        chances = np.where(features[:, RECENT] > 0.5, 0.9, 0.1)
        right = rng.random(6) < chances
        one_number = calibration.corrected(features[:, OWN])
        for name, logs in (
            ("predictor", predictor.corrected(features)),
            ("calibration", one_number),
        ):
            found = np.clip(np.exp(logs), 1e-4, 1 - 1e-4)
            losses[name].append(-np.log(np.where(right, found, 1 - found)).mean())
        predictor.observe(0, features, right)
        calibration.observe(float(np.exp(one_number).sum()), int(right.sum()))
    means = {name: np.mean(found[1500:]) for name, found in losses.items()}
    # 0.325 is what the truth itself would lose.
    assert means["predictor"] < 0.42 and means["calibration"] > 0.6, means


def test_a_source_that_nobody_tests_gets_its_own_chances_back():
    """Else what was wrong for long would be left out for good."""
    predictor = Predictor()
    experience = Experience([SimpleNamespace(predictor=predictor)], Budget())
    features = node_features(np.log([0.9]), 0.0, np.arange(1), 1, 0.0, 0.5)
    for _ in range(300):
        predictor.observe(0, features, np.array([False]))
        before = predictor.weights.copy()
        experience.forgive()
        assert (predictor.weights == before).all()
    chances = []
    for num_steps in (0, 1000, 30_000):
        for _ in range(num_steps):
            experience.forgive()
        chances.append(np.exp(predictor.corrected(features)[0]))
    assert chances[0] < 0.1 and chances[0] < chances[1] < 0.3 and chances[2] > 0.8


def test_recent_guesses_are_those_of_the_request():
    guesses = Guesses()
    for _ in range(60):
        guesses.observe(3, np.array([True, True]))
        guesses.observe(4, np.array([False]))
    guesses.observe(4, np.zeros(0, bool))  # nothing tested, nothing forgotten
    good, bad, new = guesses.recent([3, 4, 5])
    assert good > 0.95 and bad < 0.1 and new == 0.5
    for _ in range(10):
        guesses.observe(3, np.array([False]))
    assert guesses.recent([3])[0] < 0.6
    guesses.start(4)
    assert guesses.recent([4])[0] == 0.5


def test_only_first_guesses_count_as_such():
    predictor, features = Predictor(), some_features(4)
    features[:, 2] = [0, 1, 2, 0]
    predictor.observe(7, features, np.array([True, False, False, True]))
    assert predictor.guesses.recent([7])[0] == 0.75


def test_a_file_brings_the_same_chances(tmp_path):
    predictor = random_predictor(5)
    file = tmp_path / "predictor.json"
    file.write_text(json.dumps({"predictor": predictor.learned(), "about": {}}))
    features = some_features(30)
    found = read_predictor(file)
    assert (found.corrected(features) == predictor.corrected(features)).all()
    assert found.learned() == predictor.learned()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"weights": [0.0]}, "must be [63] numbers"),
        ({"weights": [float("nan")] * 63}, "must be [63] numbers"),
        ({"weights": "x"}, "ValueError"),
        ({"weights": None}, "must be [63] numbers"),
        ({"size": 8.0}, f"size must be an integer from 0 to {MAX_SIZE}; got 8.0"),
        ({"size": MAX_SIZE + 1}, "size must be an integer"),
        ({"steps": -1}, "steps must be an integer"),
        ({"features": ["own"]}, "features must be own, above"),
        ({"wieghts": 1}, "did you mean 'weights'"),
    ],
)
def test_other_content_is_refused(tmp_path, change, part):
    file = tmp_path / "predictor.json"
    state = {"predictor": {**Predictor(7).learned(), **change}}
    file.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="what fit-scheduler has written") as error:
        read_predictor(file)
    assert part in str(error.value)


@pytest.mark.parametrize("text", [None, "", "[]", "{", "{}", '{"predictor": []}', "\0"])
def test_no_such_file_is_refused(tmp_path, text):
    file = tmp_path / "predictor.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="what fit-scheduler has written; got '/"):
        read_predictor(file)
