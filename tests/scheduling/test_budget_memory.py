"""What a budget has learned survives its engine, and never harms the next one."""

import json
import shutil

import numpy as np
import pytest

from vllm_specinfer.drafting.experience import Experience
from vllm_specinfer.scheduling import budget_memory
from vllm_specinfer.scheduling.budget_memory import SAVE_STEPS, BudgetMemory
from vllm_specinfer.scheduling.calibration import Calibration
from vllm_specinfer.scheduling.exploration import SHORTEST_RUN
from vllm_specinfer.scheduling.load_budget import LoadBudget
from vllm_specinfer.scheduling.predictor import Predictor, node_features


class Silent:
    """A source without proposals."""

    def __init__(self):
        self.calibration, self.predictor = Calibration(), None


def engine(num_sources=2):
    budget = LoadBudget(8)
    return Experience([Silent() for _ in range(num_sources)], budget), budget


def experienced():
    experience, budget = engine()
    for n in range(1, 200):
        budget.observe_step(n % 64 + 1, 10e-3 + 0.4e-3 * (n % 64 + 1), True)
        budget.observe_draft(1, n % 9 + 1, n % 4, 2e-3 + 1e-3 * (n % 4))
    budget.least_score(np.log(np.full((1, 8), 0.6)), drafted=True)
    for _ in range(30):
        experience.sources[1].calibration.observe(1.0, 0)
    return experience, budget


def remembering(monkeypatch, file, experience, rank=0):
    """The memory of one of the ranks; the others would get the same."""
    monkeypatch.setattr(budget_memory, "of_first_rank", lambda value: value)
    monkeypatch.setattr(budget_memory, "is_first_rank", lambda: rank == 0)
    return BudgetMemory(file, experience)


def test_a_saved_budget_is_the_next_ones_start(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    experience, budget = experienced()
    file = budget_memory.file_of("target", "sources")
    assert budget_memory.load(file) is None
    for rank in (1, 0):
        memory = remembering(monkeypatch, file, experience, rank)
        for _ in range(SAVE_STEPS - 1):
            memory.note_step()
        assert not file.exists()
        memory.note_step()
        assert file.exists() is (rank == 0)
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    again, recalled = engine()
    remembering(monkeypatch, file, again)
    for rows in (1, 9, 40):
        cost = recalled._step.seconds(rows, True)
        assert cost == pytest.approx(budget._step.seconds(rows, True), rel=0.05)
    distrusts = [
        [s.calibration.distrust for s in x.sources] for x in (experience, again)
    ]
    assert distrusts[0] == distrusts[1] and distrusts[0][1] > 0.5
    # What it knows already it does not try out.
    assert all(recalled.grows(1) for _ in range(SHORTEST_RUN - 1))
    # A few timings of its own count more.
    for _ in range(60):
        recalled.observe_step(9, 1.5 * (10e-3 + 9 * 0.4e-3), True)
    assert recalled._step.seconds(9, True) == pytest.approx(20.4e-3, rel=0.1)


def test_saved_predictors_are_the_next_ones_start():
    experience, _ = experienced()
    features = node_features(np.log([0.9, 0.1]), 0.0, np.arange(2), 1, 0.0, 0.5)
    for source in experience.sources:
        source.predictor = Predictor()
    for _ in range(30):
        experience.sources[1].predictor.observe(0, features, np.array([False, True]))
    learned = json.loads(json.dumps(experience.learned()))
    again, _ = engine()
    with pytest.raises(ValueError):  # saved by an engine that learns in another way
        again.recall(learned)
    for source in again.sources:
        source.predictor = Predictor()
    again.recall(learned)
    first, second = (s.predictor.corrected(features) for s in again.sources)
    np.testing.assert_allclose(np.exp(first), [0.9, 0.1])
    assert (second == experience.sources[1].predictor.corrected(features)).all()
    assert np.log(0.2) < second[1] and second[0] < np.log(0.7)
    del learned["predictors"]
    with pytest.raises(ValueError):
        again.recall(learned)


def test_other_circumstances_have_another_file():
    files = {budget_memory.file_of(*c) for c in (("a", 1), ("a", 2), ("b", 1))}
    assert len(files) == 3


@pytest.mark.parametrize("name", ["cpu/strips.cpp", "triton/growth.py"])
def test_other_kernels_have_another_file(tmp_path, monkeypatch, name):
    before = budget_memory.file_of("a")
    shutil.copytree(budget_memory._KERNELS, tmp_path / "kernels")
    monkeypatch.setattr(budget_memory, "_KERNELS", tmp_path / "kernels")
    assert budget_memory.file_of("a") == before
    with (tmp_path / "kernels" / name).open("a") as source:
        source.write("// and more")
    assert budget_memory.file_of("a") != before


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"budget": 1}', "{}", "[" * 100_000])
def test_a_file_that_was_tampered_with_is_refused(tmp_path, text):
    file = tmp_path / "budget.json"
    file.write_text(text)
    learned = budget_memory.load(file)
    if learned is not None:
        with pytest.raises((KeyError, TypeError, ValueError)):
            engine()[0].recall(learned)


def test_numbers_that_are_none_or_too_few_are_refused():
    learned = json.loads(json.dumps(experienced()[0].learned()))
    with pytest.raises(ValueError, match="must be \\[3\\] numbers"):
        engine(num_sources=3)[0].recall(learned)
    for broken in (float("nan"), "x", None, 10**400):
        costs = learned["budget"]["draft"]["values"]
        for numbers in (costs, learned["distrust"]):
            right, numbers[0] = numbers[0], broken
            experience, budget = engine()
            with pytest.raises((TypeError, ValueError)):
                experience.recall(learned)
            assert not budget._step.known
            numbers[0] = right


@pytest.mark.parametrize(("saved", "recalled"), [(1e9, 8.0), (-1e9, -1.5), (2.0, 2.0)])
def test_a_source_is_believed_no_less_than_it_could_deserve(saved, recalled):
    """Else it might not be asked again, and nothing would be unlearned."""
    experience, _ = experienced()
    learned = experience.learned() | {"distrust": [0.0, saved]}
    experience.recall(learned)
    assert [s.calibration.distrust for s in experience.sources] == [0.0, recalled]


def test_a_folder_that_cannot_be_written_is_only_logged(tmp_path, caplog):
    """Once, whatever the new file would have been called."""
    (tmp_path / "file").write_text("")
    for name in ("budget.json", "budget2.json"):
        budget_memory.save(tmp_path / "file" / name, {})
    (message,) = caplog.messages
    assert "could not be saved" in message and "exists" in message


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(budget_memory.Path, "replace", full)
    budget_memory.save(tmp_path / "budget.json", {})
    assert not list(tmp_path.iterdir())
