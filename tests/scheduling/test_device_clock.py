"""Laps of a device are told as lessons, and only those that nothing else was in."""

import pytest
import torch

from vllm_specinfer.scheduling import device_clock
from vllm_specinfer.scheduling.device_clock import DeviceClock
from vllm_specinfer.scheduling.lessons import Lessons


class Stream:
    """A device whose moments are numbered from 0."""

    def __init__(self):
        self.num_moments = 0

    def moment(self, device):
        number, self.num_moments = self.num_moments, self.num_moments + 1
        return Moment(number)


class Moment:
    def __init__(self, number):
        self.number = number

    def seconds_since(self, earlier):
        return 10.0 * self.number - 10.0 * earlier.number


@pytest.fixture
def stream(monkeypatch):
    result = Stream()
    monkeypatch.setattr(device_clock, "Moment", result.moment)
    return result


def test_laps_are_told_in_order_as_lessons_of_their_steps(stream):
    lessons, told = Lessons(), []
    clock = DeviceClock(torch.device("cpu"), lessons)
    for name in ("first", "a", "b", "c"):
        clock.lap(lambda seconds, name=name: told.append((name, seconds)))
        if name == "b":
            lessons.end_step()
    assert not told
    lessons.learn(in_flight=1)
    assert told == [("a", 10.0), ("b", 10.0)]
    lessons.learn()
    assert told[2:] == [("c", 10.0)]


def test_what_ran_in_between_is_nobodys_lap(stream):
    lessons, told = Lessons(), []
    clock = DeviceClock(torch.device("cpu"), lessons)
    clock.lap(told.append)
    clock.restart()
    clock.lap(told.append)
    lessons.learn()
    assert not told
    clock.lap(told.append)
    lessons.learn()
    assert told == [10.0]


def test_a_cpus_laps_are_its_own_time():
    lessons, told = Lessons(), []
    clock = DeviceClock(torch.device("cpu"), lessons)
    clock.lap(told.append)
    clock.lap(told.append)
    lessons.learn()
    (seconds,) = told
    assert 0 < seconds < 1
