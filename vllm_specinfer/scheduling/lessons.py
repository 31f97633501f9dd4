"""What steps bring is learned in their order, on every rank at the same place.

With asynchronous scheduling the host launches a step before it knows what the last ones
have brought. If it learned of each as soon as it can, when that is would depend on the
thread that sends outputs, which only one rank has, and the ranks would draft different
trees. So each of them learns of a step when it launches the one two steps later, whose
scheduler has heard of it: nobody has to wait for what is learned then.
"""

from collections import deque
from collections.abc import Callable

# Steps that may have been launched and not been heard of.
IN_FLIGHT = 2

Lesson = Callable[[], None]


class Lessons:
    """What is still to be learned, by step."""

    def __init__(self) -> None:
        """Nothing is."""
        self._steps: deque[list[Lesson]] = deque([[]])

    def add(self, lesson: Lesson) -> None:
        """Of this step; it may wait for the device."""
        self._steps[-1].append(lesson)

    def end_step(self) -> None:
        """What is added from now on is of the next one."""
        self._steps.append([])

    def learn(self, in_flight: int = 0) -> None:
        """Learn of all steps but the last ones.

        Args:
            in_flight: How many, this one among them.
        """
        while len(self._steps) > in_flight:
            for lesson in self._steps.popleft():
                lesson()
        if not self._steps:
            self._steps.append([])
