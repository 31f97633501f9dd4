"""Suffix lookup where the host does not look on.

The definition is `Suffixes`. Here the texts are scanned instead of indexed, and all
shapes are fixed, so that captured graphs can do it.

Dimension legend: S request slots, R requests, Q searches, P places per search, N nodes
of a tree, G tokens per generation of past texts.
"""

from typing import NamedTuple

import numpy as np
import torch

from vllm_specinfer.drafting.device_lookup import DeviceLookup
from vllm_specinfer.drafting.suffix import (
    MAX_MATCH,
    MAX_PLACES,
    MIN_OWN,
    MIN_PAST,
    PAST_TRUST,
    TEXT_END,
)
from vllm_specinfer.drafting.text_copies import TextCopies
from vllm_specinfer.kernels.triton.places import newest_places
from vllm_specinfer.tree.on_device import DeviceCandidates, cut
from vllm_specinfer.tree.token_tree import ROOT


class Matches(NamedTuple):
    """The longest matches of Q searches, and what followed them.

    Attributes:
        lengths: [Q] int64 tokens that match; 0 for none.
        num_paths: [Q] int64 places behind such a match.
        tokens: [Q, P, N] int64 what followed, newest place first.
        there: [Q, P, N] bool; the others are no tokens of such a path.
    """

    lengths: torch.Tensor
    num_paths: torch.Tensor
    tokens: torch.Tensor
    there: torch.Tensor


class DeviceSuffixes(DeviceLookup):
    """Past texts are kept here; those of running requests are in their copies.

    Attributes:
        ends: Columns once the candidates of a depth are known.
    """

    def __init__(
        self, copies: TextCopies, num_nodes: int, generation_size: int
    ) -> None:
        """Start without past texts.

        Args:
            copies: Of the texts of all slots.
            num_nodes: Most nodes of a tree (N).
            generation_size: Tokens of past texts, twice (G).
        """
        super().__init__(copies)
        self._num_nodes = num_nodes
        device = copies.tokens.device
        # The newer and the older generation; the last column is for padding.
        shape = 2, generation_size + 1
        self._past = torch.zeros(shape, dtype=torch.int32, device=device)
        self._filled = torch.zeros(2, dtype=torch.int64, device=device)
        # Slots whose text, still in vLLM's rows, is to be kept no more.
        self._forgotten: set[int] = set()
        self._steps = torch.arange(num_nodes, device=device)
        self._back = torch.arange(1, MAX_MATCH + 1, device=device)
        self._places = torch.arange(MAX_PLACES, device=device)
        self.ends = [MAX_PLACES * (1 + depth) for depth in range(num_nodes)]
        # A text and its end.
        width = min(copies.tokens.shape[1] + 1, generation_size)
        self._columns = torch.arange(width, device=device)

    @torch.inference_mode()  # as what has captured it
    def forget(self) -> None:
        """Forget all texts; those of running requests are looked up in again."""
        self._filled.zero_()
        self._forgotten = set(range(len(self._copies.texts.lengths)))

    def fill(self, correction: tuple[float, float], slots: np.ndarray) -> None:
        """Say what is looked up next."""
        super().fill(correction, slots)
        self._forgotten.difference_update(slots.tolist())

    def start(self, slot: int) -> None:
        """Keep the text of the slot's last request; the new one's is not there yet."""
        super().start(slot)
        past, filled = self._past, self._filled
        size, width = past.shape[1] - 1, len(self._columns)
        texts = self._copies.texts
        length = texts.lengths[slot].long() * (slot not in self._forgotten)
        self._forgotten.discard(slot)
        kept = (length + 1).clamp_max(width)
        is_full = filled[0] + kept > size
        past[1].copy_(torch.where(is_full, past[0], past[1]))
        filled[1].copy_(torch.where(is_full, filled[0], filled[1]))
        filled[0].masked_fill_(is_full, 0)
        text = texts.tokens[slot]
        source = length + 1 - kept + self._columns
        tokens = text[source.clamp_max(len(text) - 1)]
        tokens = torch.where(source < length, tokens, TEXT_END)
        places = torch.where(self._columns < kept, filled[0] + self._columns, size)
        past[0].scatter_(0, places, tokens.to(past.dtype))
        filled[0] += kept

    def find(self, slots: torch.Tensor, grows: torch.Tensor) -> DeviceCandidates:
        """What may follow the texts of R requests.

        Args:
            slots: [R] int64 request slots.
            grows: [R] bool; the others get no candidates.

        Returns:
            The N likeliest of each request; as many levels as nodes, a column per
            place.
        """
        num_reqs, lengths = len(slots), self._copies.read(slots)
        own = self._own_matches(slots, lengths)
        past = self._past_matches(slots, lengths)
        found = Matches(*(
            torch.cat([mine[:, None], others.unflatten(0, (num_reqs, 2))], dim=1)
            for mine, others in zip(own, past, strict=True)
        ))  # fmt: skip
        # The own text goes first, then the newer generation.
        which = (found.lengths > 0).to(torch.int8).argmax(dim=1)
        requests = torch.arange(num_reqs, device=slots.device)
        chosen = Matches(*(part[requests, which] for part in found))
        trust = torch.where(which > 0, PAST_TRUST, 1.0).double()
        there = self._known(chosen.tokens, chosen.there & grows[:, None, None])
        return self._tree(chosen._replace(there=there), trust)

    def _own_matches(self, slots: torch.Tensor, lengths: torch.Tensor) -> Matches:
        """Within the request's text; at its end a path goes on from its place."""
        matched, places = self._longest(
            self._copies.tokens, slots, lengths, slots, lengths, MIN_OWN
        )
        period = (lengths[:, None] - places)[:, :, None]
        after = places[:, :, None] + self._steps % period
        tokens = self._copies.tokens[slots[:, None, None], after.clamp_min(0)]
        found = places >= 0
        there = found[:, :, None].expand_as(tokens)
        return Matches(matched, found.sum(dim=1), tokens.long(), there)

    def _past_matches(self, slots: torch.Tensor, lengths: torch.Tensor) -> Matches:
        """Within both generations, the newer one first: 2R searches."""
        both = torch.arange(2, device=slots.device).repeat(len(slots))
        slots, lengths = slots.repeat_interleave(2), lengths.repeat_interleave(2)
        ends = self._filled[both]
        matched, places = self._longest(
            self._past, both, ends, slots, lengths, MIN_PAST
        )
        after = places[:, :, None] + self._steps
        found = places >= 0
        inside = found[:, :, None] & (after < ends[:, None, None])
        after = torch.where(inside, after, 0)
        tokens = self._past[both[:, None, None], after].long()
        there = (inside & (tokens != TEXT_END)).int().cumprod(dim=-1).bool()
        return Matches(matched, found.sum(dim=1), tokens, there)

    def _longest(
        self,
        searched: torch.Tensor,
        rows: torch.Tensor,
        ends: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        min_match: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the newest places those behind the longest match; as `newest_places`.

        Returns:
            [Q] how long it is, and [Q, P] the places, -1 for none.
        """
        texts = self._copies.tokens
        places = newest_places(
            *(searched, rows, ends, texts, slots, lengths),
            num_places=MAX_PLACES,
            min_match=min_match,
        )
        before = places[:, :, None] - self._back
        last = (lengths[:, None] - self._back)[:, None]
        equal = (
            searched[rows[:, None, None], before.clamp_min(0)]
            == (texts[slots[:, None, None], last.clamp_min(0)])
        )
        equal &= (before >= 0) & (last >= 0)
        matched = equal.int().cumprod(dim=-1).sum(dim=-1)
        longest = matched.amax(dim=1)
        kept = (places >= 0) & (matched == longest[:, None])
        return longest, torch.where(kept, places, -1)

    def _tree(self, matches: Matches, trust: torch.Tensor) -> DeviceCandidates:
        """The likeliest nodes of the tries of R searches' paths.

        Args:
            matches: One search per request.
            trust: [R] of the first depth.
        """
        length, num_paths, tokens, there = matches
        same = (tokens[:, :, None] == tokens[:, None]) & there[:, :, None]
        same = (same & there[:, None]).int().cumprod(dim=-1)
        # Of each node, which all paths with it share, the first path.
        first, through = same.to(torch.int8).argmax(dim=2), same.sum(dim=2)
        above = through.roll(1, dims=-1)
        above[:, :, 0] = num_paths[:, None]
        goes_on = 1 - 1 / (length[:, None] + self._steps).clamp_min(2).double()
        goes_on[:, 0] *= trust
        chance = through / above.clamp_min(1).double() * goes_on[:, None]
        is_node = there & (first == self._places[:, None])
        reached = torch.where(is_node, chance.cumprod(dim=-1), -torch.inf)
        parents = torch.where(
            self._steps > 0, first.roll(1, -1) + (self._steps - 1) * MAX_PLACES, ROOT
        )
        scores = self._scores(chance)

        def by_level(part: torch.Tensor) -> torch.Tensor:
            return part.transpose(1, 2).flatten(1)

        # The choice comes before the correction.
        best = cut(
            DeviceCandidates(*map(by_level, (tokens, parents, reached))),
            self._num_nodes,
        )
        kept = best.scores.isfinite()
        return best._replace(scores=torch.where(kept, by_level(scores), -torch.inf))
