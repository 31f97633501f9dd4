"""What a user may write in ``--speculative-config``, parsed.

Limits of this version: one neural SSM, no learned policy.
"""

import re
from collections.abc import Mapping
from typing import Any

from vllm_specinfer.keys import refuse_unknown_keys
from vllm_specinfer.options import (
    DEFAULT_MAX_DEPTH,
    DEFAULT_MAX_WIDTH,
    DEFAULT_MIN_PROBABILITY,
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    METHOD,
    SCHEDULERS,
    VERIFICATIONS,
    BestFirstTree,
    ExpansionTree,
    SpecInferOptions,
    Tree,
    is_int,
)
from vllm_specinfer.sources import parse_sources

KNOWN_KEYS = (
    "method",
    "model",
    "ssms",
    "num_speculative_tokens",
    "tree",
    "verification",
    "scheduler",
)

# vLLM's own speculative keys that users will try here, with what to do instead.
_REFUSED_KEYS = {
    "draft_tensor_parallel_size": (
        "must be left out: an SSM runs with the target's tensor parallel size"
    ),
    "num_speculative_tokens_per_batch_size": (
        "must be left out: the tree's budget does not follow a batch-size schedule"
    ),
    "rejection_sample_method": "must be left out: use verification instead",
    "draft_sample_method": "must be left out: use verification instead",
    "enable_adaptive_verification": "must be left out: it needs method dspark",
    "parallel_drafting": "must be left out: a tree is drafted level by level",
    "use_heterogeneous_vocab": (
        "must be left out: an SSM needs the target's tokenizer"
    ),
    "max_model_len": "must be left out: an SSM gets the target's max_model_len",
}


def parse_options(raw: Mapping[str, Any]) -> SpecInferOptions:
    """Turn the user's dictionary into options.

    Args:
        raw: The dictionary, ``method`` included or not. It is not changed.

    Returns:
        Options with every default filled in.

    Raises:
        ValueError: One sentence that says what must change.
    """
    config = {str(key).replace("-", "_"): value for key, value in raw.items()}
    for key in config:
        if key in _REFUSED_KEYS:
            raise ValueError(f"{key} {_REFUSED_KEYS[key]}; got {config[key]!r}")
    refuse_unknown_keys(config, KNOWN_KEYS, "speculative_config")
    method = config.get("method", METHOD)
    if method != METHOD:
        raise ValueError(f"method must be {METHOD!r}; got {method!r}")
    tree, num_nodes = _parse_budget(
        config.get("tree"), config.get("num_speculative_tokens")
    )
    return SpecInferOptions(
        sources=parse_sources(config),
        tree=tree,
        num_speculative_tokens=num_nodes,
        verification=_parse_choice(
            "verification", config.get("verification"), VERIFICATIONS
        ),
        scheduler=_parse_scheduler(config.get("scheduler")),
    )


def _parse_budget(raw_tree: Any, raw_num_nodes: Any) -> tuple[Tree, int]:
    num_nodes = raw_num_nodes
    if num_nodes is not None and (not is_int(num_nodes) or num_nodes < 1):
        raise ValueError(
            f"num_speculative_tokens must be a positive integer; got {num_nodes!r}"
        )
    if raw_tree is None:
        num_nodes = num_nodes or DEFAULT_NUM_SPECULATIVE_TOKENS
        return _default_tree(num_nodes), num_nodes
    tree = parse_tree(raw_tree)
    if num_nodes is None:
        num_nodes = _default_num_nodes(tree)
    if num_nodes > tree.num_nodes:
        raise ValueError(
            "num_speculative_tokens must be at most the tree's "
            f"{tree.num_nodes} nodes; got {num_nodes}"
        )
    if isinstance(tree, BestFirstTree):
        for name in ("max_depth", "max_width"):
            if getattr(tree, name) > num_nodes:
                raise ValueError(
                    f"tree.{name} must be at most num_speculative_tokens "
                    f"({num_nodes}); got {getattr(tree, name)}"
                )
    return tree, num_nodes


def _default_tree(num_nodes: int) -> BestFirstTree:
    """The default limits, bent so that exactly N nodes can be asked for."""
    max_depth = min(DEFAULT_MAX_DEPTH, num_nodes)
    max_width = max(DEFAULT_MAX_WIDTH, -(-num_nodes // max_depth))
    return BestFirstTree(max_depth, min(max_width, num_nodes))


def _default_num_nodes(tree: Tree) -> int:
    if isinstance(tree, ExpansionTree):
        return tree.num_nodes
    wanted = max(DEFAULT_NUM_SPECULATIVE_TOKENS, tree.max_depth, tree.max_width)
    return min(wanted, tree.num_nodes)


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
        if not all(re.fullmatch(r"[+-]?\d+", part) for part in parts):
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


def _parse_scheduler(raw: Any) -> str:
    value = _parse_choice("scheduler", raw, SCHEDULERS)
    if value == "learned":
        raise ValueError(
            "scheduler must be 'auto' or 'static', this version has no learned "
            "policy; got 'learned'"
        )
    return value


def _parse_choice(key: str, raw: Any, choices: tuple[str, ...]) -> str:
    value = "auto" if raw is None else raw
    if value not in choices:
        raise ValueError(f"{key} must be one of {', '.join(choices)}; got {value!r}")
    return value
