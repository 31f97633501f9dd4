"""The nouns of the configuration: trees, sources, options.

Standard library only: they are parsed before vLLM is imported.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

METHOD = "specinfer"

DEFAULT_MAX_DEPTH = 4
DEFAULT_MAX_WIDTH = 4
DEFAULT_MIN_PROBABILITY = 0.05
DEFAULT_NUM_SPECULATIVE_TOKENS = 8
# Far beyond what pays: every node is a row of the target's pass.
MAX_NUM_SPECULATIVE_TOKENS = 1024
# Draws of a tree are numbered by 32 bits: so many per node.
MAX_CANDIDATES = 2**32 // MAX_NUM_SPECULATIVE_TOKENS - 1

VERIFICATIONS = ("auto", "mss", "rrs", "coupled", "naive")
# Those that test the draws of sampled requests against the target.
TESTS_DRAWS = ("mss", "rrs")
AUTO_VERIFICATION = "coupled"  # as many tokens per step as any: docs/measured.md
SCHEDULERS = ("auto", "static", "learned")
XFORMERS = "xformers"
TREE_ATTENTIONS = ("auto", XFORMERS)
SSM_TYPES = ("ssm", "eagle", "eagle3")


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
        if len(self.widths) > MAX_NUM_SPECULATIVE_TOKENS:
            raise ValueError(
                f"tree must have at most {MAX_NUM_SPECULATIVE_TOKENS} levels; got "
                f"{len(self.widths)}"
            )
        for width in self.widths:
            if not is_int(width) or width < 1:
                raise ValueError(
                    "tree must be made of positive integers; got "
                    f"{width!r} in {list(self.widths)}"
                )
            if width > MAX_NUM_SPECULATIVE_TOKENS:
                raise ValueError(
                    "tree must be made of integers of at most "
                    f"{MAX_NUM_SPECULATIVE_TOKENS}; got {width}"
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
    def num_candidates(self) -> int:
        """Children of all nodes that are expanded: all there are."""
        return self.num_nodes

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; children of the root have depth 1."""
        return len(self.widths)

    @property
    def least_score(self) -> float:
        """Every node is kept."""
        return -math.inf


@dataclass(frozen=True)
class BestFirstTree:
    """A tree grown by path probability inside a depth and a width limit.

    Attributes:
        max_depth: Depth of the deepest node; children of the root have depth 1.
        max_width: Most nodes of a level that are expanded, and most children of each.
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
        is_number = is_int(least) or isinstance(least, float)
        if not is_number or not 0 <= least < 1:
            raise ValueError(
                f"tree.min_probability must be a number in [0, 1); got {least!r}"
            )

    @property
    def num_nodes(self) -> int:
        """What N may be at most."""
        return self.max_depth * self.max_width

    @property
    def least_score(self) -> float:
        """Log of the path probability below which a node is dropped."""
        return math.log(self.min_probability) if self.min_probability else -math.inf

    @property
    def num_candidates(self) -> int:
        """Children of all nodes that are expanded."""
        return (1 + self.max_width * (self.max_depth - 1)) * self.max_width


Tree = ExpansionTree | BestFirstTree


@dataclass(frozen=True)
class SSMSource:
    """A neural SSM: a causal language model with the target's tokenizer, or a head.

    Attributes:
        model: Folder or hub id, a pool's manifest already resolved.
        revision: Hub revision.
        quantization: vLLM quantization method of the weights.
        tree: Shape of this SSM's trees; None for that of all.
        num_speculative_tokens: Most nodes that it may contribute; None for all.
        type: One of `SSM_TYPES`; None for what the checkpoint's config says.
    """

    model: str
    revision: str | None = None
    quantization: str | None = None
    tree: Tree | None = None
    num_speculative_tokens: int | None = None
    type: str | None = None


@dataclass(frozen=True)
class NgramSource:
    """What followed the last n-gram where it stands first in the request's tokens.

    The names and defaults are those of vLLM's method "ngram".

    Attributes:
        name: What users and metrics call it.
        prompt_lookup_min: Shortest n-gram.
        prompt_lookup_max: Longest n-gram.
    """

    name: ClassVar[str] = "ngram"

    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5


@dataclass(frozen=True)
class SuffixSource:
    """What followed the longest match in this text, else in the last texts.

    Attributes:
        name: What users and metrics call it.
        max_tokens: Most tokens of past texts that are remembered, some 130 bytes each.
    """

    name: ClassVar[str] = "suffix"
    max_tokens: int = 131_072


Source = SSMSource | NgramSource | SuffixSource


@dataclass(frozen=True)
class SpecInferOptions:
    """A valid user configuration, every default filled in.

    Attributes:
        sources: What proposes trees, one or more.
        tree: The tree's limits.
        num_speculative_tokens: Most nodes of one request in one step (N).
        verification: One of `VERIFICATIONS`.
        scheduler: One of `SCHEDULERS`.
        scheduler_file: What "learned" starts from; None for what an engine before has
            learned, else the sources' own chances.
        tree_attention: One of `TREE_ATTENTIONS`; "auto" for the platform's own kernels.
        batch_schedule: vLLM's num_speculative_tokens_per_batch_size: fewer
            nodes than N by requests in the batch; None for N always.
    """

    sources: tuple[Source, ...]
    tree: Tree
    num_speculative_tokens: int
    verification: str = "auto"
    scheduler: str = "auto"
    scheduler_file: str | None = None
    tree_attention: str = "auto"
    batch_schedule: Any = None

    @property
    def ssms(self) -> tuple[SSMSource, ...]:
        """The neural sources, in order."""
        return tuple(s for s in self.sources if isinstance(s, SSMSource))

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The shapes there are, each once: those of the SSMs, lookups' without any."""
        trees = [ssm.tree or self.tree for ssm in self.ssms] or [self.tree]
        return tuple(dict.fromkeys(trees))

    @property
    def verification_rule(self) -> str:
        """The rule, "auto" resolved."""
        auto = self.verification == "auto"
        return AUTO_VERIFICATION if auto else self.verification

    @property
    def truncation_notice(self) -> str | None:
        """What N cuts off the SSMs' expansions, or None where whole trees fit."""
        notices = []
        for ssm in self.ssms:
            tree = ssm.tree or self.tree
            most = ssm.num_speculative_tokens or self.num_speculative_tokens
            num_cut = tree.num_nodes - most
            if isinstance(tree, ExpansionTree) and num_cut > 0:
                notices.append(
                    f"The expansion {list(tree.widths)} has {tree.num_nodes} nodes; "
                    f"num_speculative_tokens {most} cuts the last {num_cut} off."
                )
        return " ".join(dict.fromkeys(notices)) or None


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
