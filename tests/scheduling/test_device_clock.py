"""Laps of a device are told once it is through with them, and only those."""

import pytest
import torch

from vllm_specinfer.scheduling import device_clock
from vllm_specinfer.scheduling.device_clock import DeviceClock


class Stream:
    """A device that is told how far it is; moments are numbered from 0."""

    def __init__(self):
        self.num_moments, self.past = 0, -1

    def moment(self, device):
        number, self.num_moments = self.num_moments, self.num_moments + 1
        return Moment(self, number)


class Moment:
    def __init__(self, stream, number):
        self.stream, self.number = stream, number

    @property
    def is_past(self):
        return self.number <= self.stream.past

    def seconds_since(self, earlier):
        assert self.is_past and earlier.is_past
        return 10.0 * self.number - 10.0 * earlier.number


@pytest.fixture
def stream(monkeypatch):
    result = Stream()
    monkeypatch.setattr(device_clock, "Moment", result.moment)
    return result


def test_laps_are_told_in_order_when_they_are_over(stream):
    clock, told = DeviceClock(torch.device("cpu")), []
    for name in ("first", "a", "b", "c"):
        clock.lap(lambda seconds, name=name: told.append((name, seconds)))
    clock.tell_all()
    assert not told
    stream.past = 2
    clock.tell_all()
    clock.tell_all()
    assert told == [("a", 10.0), ("b", 10.0)]
    stream.past = 3
    clock.tell_all()
    assert told[2:] == [("c", 10.0)]


def test_what_ran_in_between_is_nobodys_lap(stream):
    clock, told = DeviceClock(torch.device("cpu")), []
    clock.lap(told.append)
    clock.restart()
    clock.lap(told.append)
    stream.past = 9
    clock.tell_all()
    assert not told
    clock.lap(told.append)
    clock.tell_all()
    assert told == [10.0]


def test_a_cpus_laps_are_its_own_time():
    clock, told = DeviceClock(torch.device("cpu")), []
    clock.lap(told.append)
    clock.lap(told.append)
    clock.tell_all()
    (seconds,) = told
    assert 0 < seconds < 1
