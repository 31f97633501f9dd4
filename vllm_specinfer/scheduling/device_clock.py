"""What a device takes for its work, told to those who learn from it without waiting."""

from collections import deque
from collections.abc import Callable

import torch

from vllm_specinfer.device import Moment


class DeviceClock:
    """Laps of a device's work, one after the other."""

    def __init__(self, device: torch.device) -> None:
        """No lap has begun."""
        self._device = device
        self._last: Moment | None = None
        self._laps: deque[tuple[Moment, Moment, Callable[[float], None]]] = deque()

    def restart(self) -> None:
        """Something else ran since the last lap; the next one is told to nobody."""
        self._last = None

    def lap(self, tell: Callable[[float], None]) -> None:
        """What was launched since the last lap is one.

        Args:
            tell: Hears its seconds, in a later call of `tell_all`.
        """
        now = Moment(self._device)
        if self._last is not None:
            self._laps.append((self._last, now, tell))
        self._last = now

    def tell_all(self) -> None:
        """Tell what is known of laps that are over."""
        while self._laps and self._laps[0][1].is_past:
            begin, end, tell = self._laps.popleft()
            tell(end.seconds_since(begin))
