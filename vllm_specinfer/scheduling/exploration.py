"""When a budget goes against its estimates to learn: plain steps, tries of drafting.

What is not done teaches nothing, and an estimate that was wrong once would stay so.
Both are done so often that little is lost by them.
"""

from collections.abc import Callable

# While trees pay, now and then a step goes without, to know what that costs: so often
# that this part of the time is lost by it, after so many steps at least and at most. So
# do the first steps of all.
LOST_IN_PLAIN = 0.004
SHORTEST_RUN, LONGEST_RUN, FIRST_PLAIN_STEPS = 16, 256, 3
# While drafting does not pay, it is tried again so often that this part of the time is
# lost by it, after a pause of so many steps at least and at most. Perhaps it seems not
# to pay because the machine was busy: at first pauses are shorter, each so many times
# as long as the one before.
LOST_IN_TRIES = 0.004
SHORTEST_PAUSE, LONGEST_PAUSE = 4, 4096
FIRST_PAUSE, LONGER = 64, 4
# So many steps in a row: the first one catches up with what the SSMs have missed, and a
# few would hardly change what is usual, where another text has taught it.
TRIES = 8


class PlainSteps:
    """Steps without trees."""

    def __init__(self) -> None:
        """There was none."""
        self._count, self._wait = 0, 1

    def know_first(self) -> None:
        """What the first ones would show is known."""
        self._count, self._wait = FIRST_PLAIN_STEPS, SHORTEST_RUN

    def begins(self, lost: Callable[[], float]) -> bool:
        """Whether the next step is one.

        Args:
            lost: The part of its time that it loses.
        """
        self._wait -= 1
        if self._wait > 0:
            return False
        self._count += 1
        if self._count < FIRST_PLAIN_STEPS:
            self._wait = 2
        else:
            run = max(lost() / LOST_IN_PLAIN, SHORTEST_RUN)
            self._wait = int(min(run, LONGEST_RUN))
        return True


class Tries:
    """Drafts that seem not to pay.

    Attributes:
        left: How many follow the one of this step; None where this step is no try.
    """

    def __init__(self) -> None:
        """Drafting pays."""
        self.end()

    def end(self) -> None:
        """Drafting pays."""
        self.left: int | None = None
        # Since drafting paid or was tried; no pause is longer, but for what tries lose.
        self._idle_steps, self._patience = 0, FIRST_PAUSE

    def go_on(self, lost_steps: float) -> int:
        """To the next step.

        Args:
            lost_steps: How many steps without a draft take as long as what tries lose.

        Returns:
            How long a pause was that ends with this step; 0 where none does.
        """
        if self.left:
            self.left -= 1
            return 0
        self.left = None
        self._idle_steps += 1
        pause = min(lost_steps / LOST_IN_TRIES, max(self._patience, lost_steps))
        paused = self._idle_steps
        if paused <= min(max(pause, SHORTEST_PAUSE), LONGEST_PAUSE):
            return 0
        self._patience *= LONGER
        self._idle_steps, self.left = 0, TRIES - 1
        return paused
