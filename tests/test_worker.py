"""What a step's output waits for beside the tokens, and whose weights stay."""

from types import SimpleNamespace

import pytest
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: F401  before TreeWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_specinfer.worker import TreeWorker


def test_drafts_are_counted_though_none_had_a_row_in_the_step():
    counted = []
    speculator = SimpleNamespace(
        start_verification=lambda: "stats",
        count_drafts=lambda: counted.append("drafts"),
    )

    class Samples(Worker):
        def sample_tokens(self):
            # The next step is drafted for.
            speculator.count_drafts = lambda: counted.append("later drafts")
            return SimpleNamespace(get_output=lambda: SimpleNamespace())

    class Sampled(TreeWorker, Samples):
        pass

    worker = Sampled.__new__(Sampled)
    worker.model_runner = SimpleNamespace(
        speculator=speculator,
        model_state=SimpleNamespace(count=lambda: counted.append("walks")),
    )
    output = worker.sample_tokens()
    assert counted == []
    assert output.get_output().tree_stats == "stats"
    assert counted == ["walks", "drafts"]


def test_updates_of_an_ssms_weights_are_refused_before_they_begin():
    worker = TreeWorker.__new__(TreeWorker)
    assert not worker.supports_draft_weight_updates()
    with pytest.raises(NotImplementedError, match="must be the target's"):
        worker.start_draft_weight_update()
