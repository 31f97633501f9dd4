"""The nouns of the configuration: trees, sources, options.

Standard library only, so tree code can use them without vLLM.
"""

import itertools
from dataclasses import dataclass
from typing import Any

METHOD = "specinfer"

DEFAULT_MAX_DEPTH = 4
DEFAULT_MAX_WIDTH = 4
DEFAULT_MIN_PROBABILITY = 0.05
DEFAULT_NUM_SPECULATIVE_TOKENS = 8

VERIFICATIONS = ("auto", "mss", "rrs", "coupled", "naive")
AUTO_VERIFICATION = "coupled"  # the most tokens per step of all, see the README
SCHEDULERS = ("auto", "static", "learned")


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
            if not is_int(width) or width < 1:
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
            if not is_int(value) or value < 1:
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


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
