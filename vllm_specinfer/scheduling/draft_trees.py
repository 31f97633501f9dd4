"""What workers tell the scheduler of their drafts."""

from collections.abc import Iterator
from dataclasses import dataclass

from vllm.v1.outputs import DraftTokenIds


@dataclass
class DraftTrees(DraftTokenIds):
    """Drafts with their topology.

    Attributes:
        parents: Per request the parent of each draft, `ROOT` or an earlier draft.
    """

    parents: list[list[int]]

    def each(self) -> Iterator[tuple[str, list[int], list[int]]]:
        """Request, drafts and their parents."""
        return zip(self.req_ids, self.draft_token_ids, self.parents, strict=True)
