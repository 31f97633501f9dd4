"""What workers tell the scheduler of their drafts."""

from dataclasses import dataclass

from vllm.v1.outputs import DraftTokenIds


@dataclass
class DraftTrees(DraftTokenIds):
    """Drafts with their topology.

    Attributes:
        parents: Per request the parent of each draft, `ROOT` or an earlier draft.
    """

    parents: list[list[int]]
