"""What a device takes for its work, as a lesson of the step that it was done in."""

from collections.abc import Callable

import torch

from vllm_specinfer.device import Moment
from vllm_specinfer.scheduling.lessons import Lessons


class DeviceClock:
    """Laps of a device's work, one after the other."""

    def __init__(self, device: torch.device, lessons: Lessons) -> None:
        """No lap has begun."""
        self._device = device
        self._lessons = lessons
        self._last: Moment | None = None

    def restart(self) -> None:
        """Something else ran since the last lap; the next one is told to nobody."""
        self._last = None

    def lap(self, tell: Callable[[float], None]) -> None:
        """What was launched since the last lap is one.

        Args:
            tell: Hears its seconds.
        """
        begin, end = self._last, Moment(self._device)
        if begin is not None:
            self._lessons.add(lambda: tell(end.seconds_since(begin)))
        self._last = end
