"""Structured output along the paths of a tree.

Dimension legend: N drafts of a request, W 32-bit words of a bitmask row.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
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


def bitmask_of_trees(
    manager: "StructuredOutputManager",
    requests: Sequence["Request"],
    trees: Sequence[TokenTree],
) -> np.ndarray:
    """Which tokens may follow the root and each node of some requests' trees.

    Args:
        manager: vLLM's grammars.
        requests: Those that want structured output, their grammars at the roots.
        trees: The scheduled drafts of each.

    Returns:
        [rows, W] int32: N + 1 rows of each request, the first one for the root, or as
        many as the manager has for every request (vLLM 0.33), the last ones unused. A
        node that the grammar forbids allows everything: a walk comes to it only where
        the request itself forbids all that the grammar allows, which ends it.
    """
    by_id = {request.request_id: request for request in requests}
    roots = manager.grammar_bitmask(by_id, list(by_id), {})
    rows_of_one = len(roots) // len(by_id)
    starts = np.cumsum([0, *(max(len(tree) + 1, rows_of_one) for tree in trees)])
    bitmask = np.full((starts[-1], roots.shape[1]), _EVERYTHING, np.int32)
    bitmask[starts[:-1]] = roots[::rows_of_one]
    for request, tree, start in zip(requests, trees, starts[:-1], strict=True):
        rows = bitmask[start : start + len(tree) + 1]
        # The manager has just found out.
        if request.structured_output_request.reasoning_ended is False:
            _fill_by_paths(manager, request, tree, rows)
        else:
            _fill_by_nodes(request, tree, rows)
    return bitmask


def _fill_by_nodes(request: "Request", tree: TokenTree, rows: np.ndarray) -> None:
    """The grammar goes to each node once: down the tree, and back to where it forks.

    Args:
        request: Its output is structured from the root on.
        tree: N drafts.
        rows: [N + 1, W] to fill below the root's.
    """
    grammar = request.structured_output_request.grammar
    if grammar.is_terminated():
        return
    bitmask = torch.from_numpy(rows)
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    children = defaultdict(list)
    for node, parent in enumerate(parents):
        children[parent].append(node)
    depths, depth = {ROOT: 0}, 0
    ahead = list(children[ROOT])
    while ahead:
        node = ahead.pop()
        token, parent = tokens[node], parents[node]
        if not rows[parent + 1, token // 32] >> token % 32 & 1:
            continue
        if depth > depths[parent]:
            grammar.rollback(depth - depths[parent])
        depth = depths[parent]
        if not grammar.accept_tokens(request.request_id, [token]):
            continue
        depth = depths[node] = depth + 1
        if not grammar.is_terminated():
            grammar.fill_bitmask(bitmask, node + 1)
            ahead += children[node]
    if depth:
        grammar.rollback(depth)


def _fill_by_paths(
    manager: "StructuredOutputManager",
    request: "Request",
    tree: TokenTree,
    rows: np.ndarray,
) -> None:
    """As vLLM fills those of a chain, which knows where along it reasoning ends.

    Args:
        manager: vLLM's grammars.
        request: It reasons at the root.
        tree: N drafts.
        rows: [N + 1, W] to fill below the root's.
    """
    for path in tree.leaf_paths():
        tokens = tree.tokens[path].tolist()
        bounds = manager._get_constraint_bounds(request, tokens)
        if bounds.constraint_start > len(path):
            # It still reasons at the leaf.
            rows[[node + 1 for node in path]] = rows[0]
            continue
        tokens = manager.validate_tokens(request, tokens)
        found = manager.grammar_bitmask(
            {request.request_id: request},
            [request.request_id],
            {request.request_id: tokens},
        )
        nodes = np.array([ROOT, *path])[: len(tokens) + 1]
        rows[nodes + 1] = found[: len(nodes)]
