"""What a user may write in ``--speculative-config``, parsed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_specinfer.keys import refuse_unknown_keys
from vllm_specinfer.options import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    METHOD,
    SCHEDULERS,
    TREE_ATTENTIONS,
    VERIFICATIONS,
    Source,
    SpecInferOptions,
    SSMSource,
    Tree,
    is_int,
)
from vllm_specinfer.parse_sources import parse_sources
from vllm_specinfer.parse_trees import (
    check_limits,
    check_num_candidates,
    check_num_nodes,
    default_num_nodes,
    default_tree,
    parse_num_nodes,
    parse_tree,
)
from vllm_specinfer.scheduling.predictor import read_predictor

MAX_MESSAGE = 1000

KNOWN_KEYS = (
    "method",
    "model",
    "ssms",
    "num_speculative_tokens",
    "tree",
    "num_speculative_tokens_per_batch_size",
    "verification",
    "scheduler",
    "tree_attention",
)

# vLLM's own speculative keys that users will try here, with what to do instead.
_OF_A_SOURCE = 'must stand beside its model, in ssms: [{"model": ...}]'
_REFUSED_KEYS = {
    **dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), _OF_A_SOURCE),
    **dict.fromkeys(("revision", "quantization"), _OF_A_SOURCE),
    "draft_tensor_parallel_size": (
        "must be left out: an SSM runs with the target's tensor parallel size"
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
    try:
        return _parse_options(normalised(raw))
    except RecursionError:
        raise ValueError(
            "speculative_config must have fewer levels; got one too deep to follow"
        ) from None
    except ValueError as error:
        text = str(error)
        if len(text) <= MAX_MESSAGE:
            raise
        # A value may be of any size.
        half = MAX_MESSAGE // 2
        raise ValueError(f"{text[:half]} ... {text[-half:]}") from None


def normalised(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary with underscores in its keys, as on vLLM's command line.

    Raises:
        ValueError: A key is given in both spellings.
    """
    config: dict[str, Any] = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name in config:
            raise ValueError(f"{name} must be given once; got it with - and with _")
        config[name] = value
    return config


def _parse_options(config: Mapping[str, Any]) -> SpecInferOptions:
    for key in config:
        if key in _REFUSED_KEYS:
            raise ValueError(f"{key} {_REFUSED_KEYS[key]}; got {config[key]!r}")
    refuse_unknown_keys(config, KNOWN_KEYS, "speculative_config")
    method = config.get("method", METHOD)
    if method != METHOD:
        raise ValueError(f"method must be {METHOD!r}; got {method!r}")
    sources = parse_sources(config)
    tree, num_nodes = _parse_budget(
        config.get("tree"), config.get("num_speculative_tokens"), sources
    )
    scheduler, scheduler_file = _parse_scheduler(config.get("scheduler"))
    return SpecInferOptions(
        sources=sources,
        tree=tree,
        num_speculative_tokens=num_nodes,
        batch_schedule=_parse_batch_schedule(
            config.get("num_speculative_tokens_per_batch_size")
        ),
        verification=_parse_choice(
            "verification", config.get("verification"), VERIFICATIONS
        ),
        scheduler=scheduler,
        scheduler_file=scheduler_file,
        tree_attention=_parse_choice(
            "tree_attention", config.get("tree_attention"), TREE_ATTENTIONS
        ),
    )


def _parse_budget(
    raw_tree: Any, raw_num_nodes: Any, sources: tuple[Source, ...]
) -> tuple[Tree, int]:
    """The tree of SSMs without their own, and N."""
    num_nodes = parse_num_nodes(raw_num_nodes)
    own_trees = [s.tree for s in sources if isinstance(s, SSMSource) and s.tree]
    if raw_tree is not None:
        tree = parse_tree(raw_tree)
        num_nodes = num_nodes or default_num_nodes(tree)
        check_limits(tree, num_nodes)
    else:
        num_nodes = (
            num_nodes
            or sum(default_num_nodes(own) for own in own_trees)
            or DEFAULT_NUM_SPECULATIVE_TOKENS
        )
        tree = default_tree(num_nodes)
    check_num_nodes(num_nodes)
    for each in (tree, *own_trees):
        check_num_candidates(each)
    ssms = [s for s in sources if isinstance(s, SSMSource)]
    if len(ssms) == len(sources):
        most = sum((s.tree or tree).num_nodes for s in ssms)
        if num_nodes > most:
            raise ValueError(
                f"num_speculative_tokens must be at most the tree's {most} nodes; got "
                f"{num_nodes}"
            )
    return tree, num_nodes


def _parse_batch_schedule(raw: Any) -> Any:
    """As it is: what the numbers may be is vLLM's to say."""
    if raw is None or (
        isinstance(raw, list | tuple)
        and all(isinstance(x, list | tuple) and all(map(is_int, x)) for x in raw)
    ):
        return raw
    raise ValueError(
        "num_speculative_tokens_per_batch_size must be a list of "
        f"[first, last, nodes], whole numbers; got {raw!r}"
    )


def _parse_scheduler(raw: Any) -> tuple[str, str | None]:
    """Its name, and the file that "learned" starts from."""
    if not isinstance(raw, Mapping):
        return _parse_choice("scheduler", raw, SCHEDULERS), None
    refuse_unknown_keys(raw, ("type", "file"), "scheduler")
    name = _parse_choice("scheduler.type", raw.get("type"), SCHEDULERS)
    file = raw.get("file")
    if file is None:
        return name, None
    if name != "learned":
        raise ValueError(f"scheduler.type must be 'learned' with a file; got {name!r}")
    if not isinstance(file, str) or "\0" in file:
        raise ValueError(f"scheduler.file must be the path of a file; got {file!r}")
    read_predictor(Path(file))
    return name, file


def _parse_choice(key: str, raw: Any, choices: tuple[str, ...]) -> str:
    value = "auto" if raw is None else raw
    if value not in choices:
        raise ValueError(f"{key} must be one of {', '.join(choices)}; got {value!r}")
    return value
