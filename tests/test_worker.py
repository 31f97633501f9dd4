"""What a step's output waits for beside the tokens, and whose weights stay."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.v1.worker.cpu_worker import CPUWorker  # before TreeWorker
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


@pytest.mark.parametrize("update", ["reload_weights", "finish_weight_update"])
def test_copies_of_weights_are_made_again_after_an_update(monkeypatch, update):
    """A tied head multiplies by a copy of what vLLM has written anew, as may SSMs."""
    from vllm_specinfer.cpu_worker import SpecInferCPUWorker
    from vllm_specinfer.kernels.cpu import linear

    head = nn.Module()
    head.weight = nn.Parameter(torch.randn(64, 32), requires_grad=False)
    linear.take_over(head, remove_weight=False)
    x = torch.randn(3, 32)
    before = head.cpu_linear(x, head.weight, None)
    new = torch.randn(64, 32)
    monkeypatch.setattr(CPUWorker, update, lambda self: head.weight.copy_(new))
    worker = object.__new__(SpecInferCPUWorker)
    renewed = []
    rows = SimpleNamespace(copy_again=lambda: renewed.append(head.weight.equal(new)))
    # Those of the other one are its own.
    ssms = [
        SimpleNamespace(
            ssm=SimpleNamespace(model=SimpleNamespace(lm_head=lm_head), head=rows)
        )
        for lm_head in (head, nn.Module())
    ]
    sources = SimpleNamespace(ssms=ssms)
    worker.model_runner = SimpleNamespace(
        get_model=lambda: nn.Sequential(head),
        speculator=SimpleNamespace(sources=sources),
    )
    getattr(worker, update)()
    assert renewed == [True]
    after = head.cpu_linear(x, head.weight, None)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, x @ new.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("save", ["save_sharded_state", "save_tensorized_model"])
def test_weights_in_the_kernels_order_are_not_saved(save, tmp_path):
    from vllm_specinfer.cpu_worker import SpecInferCPUWorker

    worker = object.__new__(SpecInferCPUWorker)
    with pytest.raises(NotImplementedError, match="without method specinfer"):
        getattr(worker, save)(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_updates_of_an_ssms_weights_are_refused_before_they_begin():
    worker = TreeWorker.__new__(TreeWorker)
    assert not worker.supports_draft_weight_updates()
    with pytest.raises(NotImplementedError, match="must be the target's"):
        worker.start_draft_weight_update()
