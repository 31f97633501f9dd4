"""The CUDA graphs of a CPU know what a GPU's do."""

import pytest
import torch

from tests.e2e.recorded_graphs import recorded

pytest.importorskip("triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def graphs():
    with recorded():
        yield


def captured(launch):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = launch()
    return outputs, graph.replay


def test_a_replay_reads_the_tensors_of_the_capture_and_writes_into_its_outputs():
    x, steps = torch.arange(6.0), torch.zeros(3)

    def launch():
        steps[1:].add_(1)
        return (x.view(2, 3).sum(dim=0) + steps).cumsum(0)

    found, replay = captured(launch)
    assert found.tolist() == [3, 9, 17]
    x.mul_(2)
    replay()
    assert found.tolist() == [6, 18, 34] and steps.tolist() == [0, 2, 2]


def test_a_replay_knows_nothing_of_what_the_host_has_learned():
    host = {"factor": 2, "x": torch.ones(2)}
    found, replay = captured(lambda: host["x"] * host["factor"])
    host.update(factor=5, x=torch.zeros(2), before=host["x"])
    replay()
    assert found.tolist() == [2, 2]


@pytest.mark.parametrize(
    "launch",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_fill_(x > 0, 1).sum().item(),
        lambda x: x.__setitem__(x > 0, torch.ones(2)),
        lambda x: torch.repeat_interleave(x.long()),
        lambda x: torch.equal(x, x),
    ],
)
def test_what_waits_for_the_device_cannot_be_captured(launch):
    with pytest.raises(AssertionError, match="cannot be captured"):
        captured(lambda: launch(torch.tensor([0.0, 1.0, 2.0])))


def test_memory_from_before_the_capture_must_still_be_there_at_a_replay():
    x = torch.ones(2)
    inputs = [x.clone()]

    def launch():
        inputs[0][:1].add_(x[:1])  # a view, which nobody needs to keep
        return inputs[0] * 2

    found, replay = captured(launch)
    replay()
    assert found.tolist() == [6, 2]
    inputs.clear()
    with pytest.raises(AssertionError, match="freed"):
        replay()
