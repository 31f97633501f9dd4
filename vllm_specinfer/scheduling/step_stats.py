"""What is counted in a step, on its way from the worker to the front end.

The worker hands a `WorkerStats` to the scheduler with the step's output; the scheduler
makes a `StepStats` of it, which goes to the front end with vLLM's own statistics.
"""

from collections import Counter
from dataclasses import dataclass, field

# Why a request runs in a step without any node: its tree was left out because it does
# not pay, to measure a plain step, or by the schedule over batch sizes; no source knew
# a likely token; the length limit, the step's token limit or a preemption took the
# nodes away; it reads its prompt.
BUDGET, MEASURING, SCHEDULE = "budget", "measuring", "schedule"
NO_CANDIDATES = "no_candidates"
NO_ROOM, PREFILL = "no_room", "prefill"
REASONS = (BUDGET, MEASURING, SCHEDULE, NO_CANDIDATES, NO_ROOM, PREFILL)

DRAFT, VERIFY, COMMIT = "draft", "verify", "commit"
PHASES = (DRAFT, VERIFY, COMMIT)

# What memory that runs short has brought about (scheduling/blocks.py).
SHORT_STEPS, RETURNED_BLOCKS = "short_steps", "returned_blocks"

_MARK = "specinfer"


@dataclass
class WorkerStats:
    """What the worker did in one step.

    Attributes:
        drafted: Nodes of the trees that were drafted for it, by source.
        reasons: Why requests have none, by request id; of those in a prompt nothing is
            said.
        accepted: By request id the source of each accepted node, by depth; of all
            requests whose tree was verified.
        num_nodes: How many nodes these trees had.
        seconds: Host time by phase.
    """

    drafted: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    accepted: dict[str, list[str]] = field(default_factory=dict)
    num_nodes: dict[str, int] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)


@dataclass
class StepStats:
    """What one step adds to the metrics.

    Attributes:
        drafted: Nodes of the trees that were drafted for it, by source.
        accepted: Accepted tokens by source.
        plain: Requests that ran without nodes, by reason.
        microseconds: Host time by phase.
        blocks: Steps that lacked K/V blocks, and blocks that trees gave back.
    """

    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    plain: Counter[str] = field(default_factory=Counter)
    microseconds: Counter[str] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)

    def put_into(self, numbers: dict[str, int]) -> None:
        """Add everything to a dictionary of vLLM's, under keys of our own."""
        for name, counts in vars(self).items():
            for label, count in counts.items():
                numbers[f"{_MARK} {name} {label}"] = count

    @classmethod
    def taken_from(cls, numbers: dict[str, int]) -> "StepStats":
        """What `put_into` has added to a dictionary, which is as before then."""
        step = cls()
        for key in [key for key in numbers if key.startswith(_MARK)]:
            _, name, label = key.split(" ")
            getattr(step, name)[label] = numbers.pop(key)
        return step
