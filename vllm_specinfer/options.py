"""What a user may write in ``--speculative-config``, parsed.

Limits of this version: one neural SSM, no learned policy.
Standard library only, so tree code can use the nouns without vLLM.
"""

import difflib
import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHOD = "specinfer"
MANIFEST = "manifest.json"

DEFAULT_MAX_DEPTH = 4
DEFAULT_MAX_WIDTH = 4
DEFAULT_MIN_PROBABILITY = 0.05
DEFAULT_NUM_SPECULATIVE_TOKENS = 8

VERIFICATIONS = ("auto", "mss", "rrs", "coupled", "naive")
AUTO_VERIFICATION = "coupled"  # the most tokens per step of all, see the README
SCHEDULERS = ("auto", "static", "learned")
KNOWN_KEYS = (
    "method",
    "model",
    "ssms",
    "num_speculative_tokens",
    "tree",
    "verification",
    "scheduler",
)
SSM_KEYS = ("model", "revision", "quantization")
MODEL_FREE_SOURCES = ("ngram", "suffix")

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


@dataclass(frozen=True)
class ExpansionTree:
    """A fixed tree: each node at depth d gets ``widths[d]`` children.

    Attributes:
        widths: Children per node, level by level; (1, 1, 3, 1) is the paper's.
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.widths:
            raise ValueError("tree must have at least one level; got none")
        for width in self.widths:
            if not _is_int(width) or width < 1:
                raise ValueError(
                    "tree must be made of positive integers; got "
                    f"{width!r} in {list(self.widths)}"
                )

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Nodes per level, the root excluded."""
        return tuple(itertools.accumulate(self.widths, lambda a, b: a * b))

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole tree, the root excluded."""
        return sum(self.level_sizes)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; children of the root have depth 1."""
        return len(self.widths)

    @property
    def max_width(self) -> int:
        """Nodes of the largest level."""
        return max(self.level_sizes)


@dataclass(frozen=True)
class BestFirstTree:
    """A tree grown by path probability inside a depth and a width limit.

    Attributes:
        max_depth: Depth of the deepest node; children of the root have depth 1.
        max_width: Most nodes of one level.
        min_probability: Path probability, by the SSM, below which a node is dropped:
            it would cost the target a row that is hardly ever accepted.
    """

    max_depth: int
    max_width: int
    min_probability: float = DEFAULT_MIN_PROBABILITY

    def __post_init__(self) -> None:
        for name in ("max_depth", "max_width"):
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise ValueError(
                    f"tree.{name} must be a positive integer; got {value!r}"
                )
        least = self.min_probability
        if not isinstance(least, int | float) or not 0 <= least < 1:
            raise ValueError(
                f"tree.min_probability must be a number in [0, 1); got {least!r}"
            )

    @property
    def num_nodes(self) -> int:
        """Most nodes that fit, the root excluded."""
        return self.max_depth * self.max_width


Tree = ExpansionTree | BestFirstTree


@dataclass(frozen=True)
class SSMSource:
    """A neural SSM: any causal language model with the target's tokenizer.

    Attributes:
        model: Folder or hub id, a pool's manifest already resolved.
        revision: Hub revision.
        quantization: vLLM quantization method of the weights.
    """

    model: str
    revision: str | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class SpecInferOptions:
    """A valid user configuration, every default filled in.

    Attributes:
        sources: What proposes trees; exactly one SSM in this version.
        tree: The tree's limits.
        num_speculative_tokens: Most nodes of one request in one step (N).
        verification: One of `VERIFICATIONS`.
        scheduler: "auto" or "static".
    """

    sources: tuple[SSMSource, ...]
    tree: Tree
    num_speculative_tokens: int
    verification: str = "auto"
    scheduler: str = "auto"

    @property
    def verification_rule(self) -> str:
        """The rule, "auto" resolved."""
        auto = self.verification == "auto"
        return AUTO_VERIFICATION if auto else self.verification

    @property
    def max_level_width(self) -> int:
        """Nodes of the widest level that N lets through (W)."""
        return min(self.tree.max_width, self.num_speculative_tokens)

    @property
    def truncation_notice(self) -> str | None:
        """What N cuts off the expansion, or None where the whole tree fits."""
        if not isinstance(self.tree, ExpansionTree):
            return None
        num_cut = self.tree.num_nodes - self.num_speculative_tokens
        if num_cut <= 0:
            return None
        return (
            f"The expansion {list(self.tree.widths)} has {self.tree.num_nodes} "
            f"nodes; num_speculative_tokens {self.num_speculative_tokens} cuts "
            f"the last {num_cut} off."
        )


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
    _refuse_unknown_keys(config, KNOWN_KEYS, "speculative_config")
    method = config.get("method", METHOD)
    if method != METHOD:
        raise ValueError(f"method must be {METHOD!r}; got {method!r}")
    tree, num_nodes = _parse_budget(
        config.get("tree"), config.get("num_speculative_tokens")
    )
    return SpecInferOptions(
        sources=_parse_sources(config),
        tree=tree,
        num_speculative_tokens=num_nodes,
        verification=_parse_choice(
            "verification", config.get("verification"), VERIFICATIONS
        ),
        scheduler=_parse_scheduler(config.get("scheduler")),
    )


def _parse_budget(raw_tree: Any, raw_num_nodes: Any) -> tuple[Tree, int]:
    num_nodes = raw_num_nodes
    if num_nodes is not None and (not _is_int(num_nodes) or num_nodes < 1):
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
        _refuse_unknown_keys(raw, tuple(defaults), "tree")
        return BestFirstTree(**(defaults | dict(raw)))
    raise ValueError(
        "tree must be an expansion such as [1, 1, 3, 1] or an object with max_depth "
        f"and max_width; got {raw!r}"
    )


def _parse_sources(config: Mapping[str, Any]) -> tuple[SSMSource, ...]:
    model, ssms = config.get("model"), config.get("ssms")
    if model is not None and ssms is not None:
        raise ValueError("model and ssms must not both be given; got both")
    if model is None and ssms is None:
        raise ValueError(
            "model must name an SSM, a folder, a hub id or a pool; got none"
        )
    if model is not None:
        sources = _parse_source(model, "model")
    elif isinstance(ssms, list | tuple):
        sources = tuple(
            source
            for i, raw in enumerate(ssms)
            for source in _parse_source(raw, f"ssms[{i}]")
        )
    else:
        raise ValueError(f"ssms must be a list; got {ssms!r}")
    if len(sources) != 1:
        raise ValueError(
            "ssms must name exactly one SSM, this version supports no more; got "
            f"{len(sources)}"
        )
    return sources


def _parse_source(raw: Any, where: str) -> tuple[SSMSource, ...]:
    entry = {"model": raw} if isinstance(raw, str | os.PathLike) else raw
    if not isinstance(entry, Mapping) or where == "model" and entry is raw:
        kinds = "a string" if where == "model" else "a string or an object"
        raise ValueError(f"{where} must be {kinds}; got {raw!r}")
    _refuse_unknown_keys(entry, SSM_KEYS, where)
    name = entry.get("model")
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{where} must name a model; got {name!r}")
    for key in ("revision", "quantization"):
        if not isinstance(entry.get(key), str | None):
            raise ValueError(f"{where}.{key} must be a string; got {entry[key]!r}")
    if name in MODEL_FREE_SOURCES:
        raise ValueError(
            f"{where} must be a neural SSM, this version supports one SSM and no "
            f"other source; got {name!r}"
        )
    return tuple(
        SSMSource(path, entry.get("revision"), entry.get("quantization"))
        for path in _resolve_model(name, where)
    )


def _resolve_model(name: str, where: str) -> list[str]:
    """The model folders behind a name: itself, or a pool's members."""
    folder = Path(name).expanduser()
    if not folder.exists():
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.startswith("."):
            return [name]
        raise ValueError(
            f"{where} must be an existing folder or a hub id; got {name!r}"
        )
    manifest = folder / MANIFEST
    if manifest.is_file():
        return _read_manifest(manifest)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{where} must be a whole model; got a LoRA adapter, {name!r}")
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise ValueError(
            f"{where} must be a folder with config.json or {MANIFEST}; got {name!r}"
        )
    return [str(folder)]


def _read_manifest(manifest: Path) -> list[str]:
    try:
        content = json.loads(manifest.read_text())
    except ValueError as error:
        raise ValueError(f"{manifest} must be JSON; got {error}") from error
    entries = content.get("ssms") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("model"), str)
        for entry in entries
    ):
        raise ValueError(
            f'{manifest} must hold {{"ssms": [{{"model": "..."}}]}}; got {content!r}'
        )
    folders = [manifest.parent / entry["model"] for entry in entries]
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{manifest} must name folders with config.json; got {folder}"
            )
    return [str(folder) for folder in folders]


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


def _refuse_unknown_keys(
    config: Mapping[str, Any], known: tuple[str, ...], where: str
) -> None:
    for key in config:
        if key in known:
            continue
        close = difflib.get_close_matches(str(key), known, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"{where} keys must be among {', '.join(known)}; got {key!r}{hint}"
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
