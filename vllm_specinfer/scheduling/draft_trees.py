"""What workers tell the scheduler of their drafts."""

from dataclasses import dataclass

from vllm.v1.outputs import DraftTokenIds


@dataclass
class DraftTrees(DraftTokenIds):
    """Drafts with their topology.

    Attributes:
        parents: Per request the parent of each draft, `ROOT` or an earlier draft.
        reasons: Why requests have no drafts, by request id; of those in a prompt
            nothing is said.
    """

    parents: list[list[int]]
    reasons: dict[str, str]
