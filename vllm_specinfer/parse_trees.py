"""The key ``tree`` and how many nodes go with it."""

import re
from collections.abc import Mapping
from typing import Any

from vllm_specinfer.keys import refuse_unknown_keys
from vllm_specinfer.options import (
    DEFAULT_MAX_DEPTH,
    DEFAULT_MAX_WIDTH,
    DEFAULT_MIN_PROBABILITY,
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    MAX_CANDIDATES,
    MAX_NUM_SPECULATIVE_TOKENS,
    BestFirstTree,
    ExpansionTree,
    Tree,
    is_int,
)


def parse_num_nodes(raw: Any, where: str = "") -> int | None:
    """Parse a ``num_speculative_tokens``, None where it is left out."""
    if raw is not None and (not is_int(raw) or raw < 1):
        raise ValueError(
            f"{where}num_speculative_tokens must be a positive integer; got {raw!r}"
        )
    if raw is not None:
        check_num_nodes(raw, where)
    return raw


def check_num_nodes(num_nodes: int, where: str = "") -> None:
    """Raises ValueError where there are more nodes than can be meant."""
    if num_nodes > MAX_NUM_SPECULATIVE_TOKENS:
        raise ValueError(
            f"{where}num_speculative_tokens must be at most "
            f"{MAX_NUM_SPECULATIVE_TOKENS}; got {num_nodes}"
        )


def default_tree(num_nodes: int) -> BestFirstTree:
    """The default limits, bent so that exactly N nodes can be asked for."""
    max_depth = min(DEFAULT_MAX_DEPTH, num_nodes)
    max_width = max(DEFAULT_MAX_WIDTH, -(-num_nodes // max_depth))
    return BestFirstTree(max_depth, min(max_width, num_nodes))


def default_num_nodes(tree: Tree) -> int:
    """As many nodes as the expansion has, or the default within the limits."""
    if isinstance(tree, ExpansionTree):
        return tree.num_nodes
    wanted = max(DEFAULT_NUM_SPECULATIVE_TOKENS, tree.max_depth, tree.max_width)
    return min(wanted, tree.num_nodes)


def check_limits(tree: Tree, num_nodes: int, where: str = "") -> None:
    """Raises ValueError where N nodes are too few for a best-first tree's limits."""
    if not isinstance(tree, BestFirstTree):
        return
    for name in ("max_depth", "max_width"):
        if getattr(tree, name) > num_nodes:
            raise ValueError(
                f"{where}tree.{name} must be at most num_speculative_tokens "
                f"({num_nodes}); got {getattr(tree, name)}"
            )


def check_num_candidates(tree: Tree) -> None:
    """Raises ValueError where there are more than draws can be numbered."""
    if tree.num_candidates > MAX_CANDIDATES:
        raise ValueError(
            f"tree must have at most {MAX_CANDIDATES} candidates; got "
            f"{tree.num_candidates}"
        )


def parse_tree(raw: Any) -> Tree:
    """Parse the ``tree`` key.

    Args:
        raw: "1,1,3,1", [1, 1, 3, 1], {"max_depth": 4, "max_width": 4} or a tree.

    Returns:
        The tree.

    Raises:
        ValueError: The tree is impossible or of an unknown form.
    """
    if isinstance(raw, ExpansionTree | BestFirstTree):
        return raw
    if isinstance(raw, str):
        parts = [part.strip() for part in raw.strip().strip("[]()").split(",")]
        if not all(re.fullmatch(r"[+-]?\d{1,9}", part) for part in parts):
            raise ValueError(
                "tree must be integers separated by commas, as in '1,1,3,1'; got "
                f"{raw!r}"
            )
        return ExpansionTree(tuple(int(part) for part in parts))
    if isinstance(raw, list | tuple):
        return ExpansionTree(tuple(raw))
    if isinstance(raw, Mapping):
        defaults = {
            "max_depth": DEFAULT_MAX_DEPTH,
            "max_width": DEFAULT_MAX_WIDTH,
            "min_probability": DEFAULT_MIN_PROBABILITY,
        }
        refuse_unknown_keys(raw, tuple(defaults), "tree")
        return BestFirstTree(**(defaults | dict(raw)))
    raise ValueError(
        "tree must be an expansion such as [1, 1, 3, 1] or an object with max_depth "
        f"and max_width; got {raw!r}"
    )
