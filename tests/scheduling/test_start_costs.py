"""What is measured before the first request."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_specinfer import cpu_worker
from vllm_specinfer.cpu_worker import SpecInferCPUWorker
from vllm_specinfer.scheduling import start_costs
from vllm_specinfer.scheduling.exploration import SHORTEST_RUN
from vllm_specinfer.scheduling.load_budget import LoadBudget
from vllm_specinfer.worker import TreeWorker


class Machine:
    """Passes that take 10 ms and 0.4 ms per row, the SSMs' 1 ms; every fifth pauses."""

    def __init__(self, slow: float = 1.0) -> None:
        self.slow, self.runs = slow, []

    def run(self, rows: int) -> tuple[float, float]:
        self.runs.append(rows)
        target = self.slow * (10e-3 + 0.4e-3 * rows)
        return target + 0.05 * (len(self.runs) % 5 == 0), 1e-3


@pytest.mark.parametrize(
    ("adapters", "replicas", "measures"),
    [(None, 1, True), ("adapters", 1, False), (None, 2, False)],
)
def test_costs_are_not_those_of_made_up_adapters_or_of_other_replicas(
    monkeypatch, adapters, replicas, measures
):
    monkeypatch.setattr(TreeWorker, "compile_or_warm_up_model", lambda self: "times")
    runs, budget = [], LoadBudget(8)
    worker = SpecInferCPUWorker.__new__(SpecInferCPUWorker)
    worker.vllm_config = SimpleNamespace(
        lora_config=adapters,
        parallel_config=SimpleNamespace(data_parallel_size=replicas),
        scheduler_config=SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=16),
    )
    worker.model_runner = SimpleNamespace(
        speculator=SimpleNamespace(
            budget=budget, num_speculative_steps=8, dummy_seconds=0.0
        ),
        _dummy_run=lambda rows, randomize_inputs: runs.append(rows),
    )
    monkeypatch.setattr(cpu_worker, "of_first_rank", lambda seconds: seconds)
    assert worker.compile_or_warm_up_model() == "times"
    assert bool(runs) == budget._step.known == measures


def test_a_budget_starts_with_what_passes_take():
    budget, machine = LoadBudget(8), Machine()
    start_costs.measure(budget, machine.run, most_rows=40)
    assert machine.runs == [1, 2, 4, 8, 16, 32] * start_costs.ROUNDS
    for rows in (1, 9, 30):
        seconds = budget._step.seconds(rows)
        assert seconds == pytest.approx(10e-3 + 0.4e-3 * rows, rel=0.05)
    # A draft of three levels is four passes.
    assert budget._draft.seconds(12, 3) == pytest.approx(4e-3, rel=0.1)


def test_costs_of_a_busy_machine_are_not_recalled_where_they_are_measured():
    busy, budget = LoadBudget(8), LoadBudget(8)
    start_costs.measure(busy, Machine(slow=5).run, most_rows=64)
    busy.observe_step(9, 80e-3, True)
    busy.observe_draft(1, 9, 2, 50e-3)
    budget.recall(busy.learned())
    start_costs.measure(budget, Machine().run, most_rows=64)
    assert budget._step.seconds(9, True) == pytest.approx(13.6e-3, rel=0.05)
    assert budget._draft.seconds(12, 3) == pytest.approx(4e-3, rel=0.1)


def test_no_step_goes_without_nodes_to_learn_what_is_known():
    budget = LoadBudget(8)
    start_costs.measure(budget, Machine().run, most_rows=64)
    assert all(budget.grows(1) for _ in range(SHORTEST_RUN - 1))
    assert not budget.grows(1)


def test_the_first_trees_are_cut_by_what_nodes_cost():
    scores = np.log([[0.9, 0.5, 0.011, 0.01]])
    dear, unknown = LoadBudget(4), LoadBudget(4)
    start_costs.measure(dear, Machine().run, most_rows=64)
    assert unknown.least_score(scores, drafted=True) == -np.inf
    assert np.exp(dear.least_score(scores, drafted=True)) == pytest.approx(0.5)


def test_drafting_is_judged_by_drafts_alone():
    budget = LoadBudget(4)
    start_costs.measure(budget, Machine().run, most_rows=64)
    budget.least_score(np.log(np.full((1, 4), 1e-3)), drafted=True)
    for _ in range(8):
        assert budget.drafts(1)
        budget.observe_draft(1, 4, 3, 4e-3)
    assert not budget.drafts(1)


def test_a_slow_model_is_not_measured_for_long():
    budget, machine = LoadBudget(8), Machine(slow=100)
    start_costs.measure(budget, machine.run, most_rows=64)
    assert machine.runs == [1, 2, 4]
    assert budget._step.known
    patient = Machine(slow=10_000)
    start_costs.measure(LoadBudget(8), patient.run, most_rows=64)
    assert patient.runs == [1]
