"""Structured output along the paths of a tree.

Dimension legend: N drafts of a request, W 32-bit words of a bitmask row.
"""

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

from vllm_specinfer.tree.token_tree import ROOT, TokenTree

if TYPE_CHECKING:
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

_EVERYTHING = -1  # all bits set


class TokenByToken(GuidanceGrammar):
    """Takes what a step brings as if it had come in several.

    Guidance refuses a text that goes on behind its end unless that comes alone; under
    `ignore_eos` a step's last token may come along.
    """

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """As vLLM's."""
        accept = super().accept_tokens
        return all(accept(request_id, [token]) for token in tokens)


def goes_on_behind_its_end(request: "Request") -> None:
    """Let a request's grammar be `TokenByToken` where it is guidance's."""
    grammar = request.structured_output_request.grammar
    if type(grammar) is GuidanceGrammar:
        grammar.__class__ = TokenByToken


def tree_bitmask(
    manager: "StructuredOutputManager", request: "Request", tree: TokenTree
) -> np.ndarray:
    """Which tokens may follow the root and each node.

    vLLM's own bitmask of a chain of drafts is made for every path from the root to a
    leaf: the grammar goes along the path and back again.

    Args:
        manager: vLLM's grammars.
        request: One that wants structured output, its grammar at the root.
        tree: The scheduled drafts.

    Returns:
        [N + 1, W] int32, row 0 for the root, or as many rows as the manager has for
        every request (vLLM 0.33), the last ones unused. A node that the grammar forbids
        allows everything, for no walk ever comes to it.
    """
    paths = list(tree.leaf_paths()) or [[]]
    bitmask = None
    for path in paths:
        tokens = manager.validate_tokens(request, tree.tokens[path].tolist())
        rows = manager.grammar_bitmask(
            {request.request_id: request},
            [request.request_id],
            {request.request_id: tokens},
        )
        if bitmask is None:
            shape = (max(len(tree) + 1, len(rows)), rows.shape[1])
            bitmask = np.full(shape, _EVERYTHING, np.int32)
        nodes = np.array([ROOT, *path])[: len(tokens) + 1]
        bitmask[nodes + 1] = rows[: len(nodes)]
    return bitmask
