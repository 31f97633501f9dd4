"""What every source of trees has in common.

Dimension legend: B requests of the batch, R of them get a tree, S request slots, n
tokens of the target's pass, D width of their states.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData

from vllm_specinfer.drafting.children import DraftRows
from vllm_specinfer.scheduling.calibration import Calibration
from vllm_specinfer.scheduling.predictor import Predictor
from vllm_specinfer.tree.candidates import Candidates
from vllm_specinfer.tree.proposals import Draws

# Per request: what was drawn for the children of each candidate; `ROOT` is one.
DrawsByNode = list[dict[int, Draws]]


@dataclass(frozen=True)
class DraftStep:
    """The batch that was just verified.

    Attributes:
        slots: [B] request slots.
        num_tokens: [B] int64 known tokens that may be read.
        growing: [R] batch indices of the requests that get a tree: those whose last
            known token is the root of one, and that no stop token has ended.
        roots: [R] the growing requests' sampling parameters and root positions.
        all_token_ids: [S, max_model_len] int32 tokens of all slots.
        tests_draws: Children of sampled requests are tested against what they were
            drawn from (`TESTS_DRAWS`).
        states: [n, D] the target's states of the tokens that it ran in this step and
            that stay, request by request; None where nobody reads them.
        state_starts: [B + 1] where each request's begin; None likewise.
        ended: All requests of the batch have ended, or will with their prompts.
    """

    slots: np.ndarray
    num_tokens: np.ndarray
    growing: np.ndarray
    roots: DraftRows
    all_token_ids: np.ndarray
    tests_draws: bool
    states: torch.Tensor | None = None
    state_starts: np.ndarray | None = None
    ended: bool = False


@dataclass(frozen=True)
class Proposal:
    """What one source proposes to the R growing requests.

    Attributes:
        candidates: The nodes.
        draws: What their children were drawn from.
        features: [R, C, X] what the predictor saw of them; None without one.
    """

    candidates: Candidates
    draws: DrawsByNode
    features: np.ndarray | None = None


class Source(Protocol):
    """Proposes trees; lookups at once, SSMs once their passes are over.

    Attributes:
        calibration: What the source's own chances are corrected by.
        predictor: What corrects them instead, None where nothing does.
    """

    calibration: Calibration
    predictor: Predictor | None

    def start(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot."""
