"""What a source tells its predictor of the nodes of its trees."""

from types import SimpleNamespace

import numpy as np

from vllm_specinfer.drafting.children import DraftRows
from vllm_specinfer.drafting.growth import EVERYTHING
from vllm_specinfer.drafting.neural import NeuralSource
from vllm_specinfer.options import BestFirstTree
from vllm_specinfer.scheduling.predictor import (
    ABOVE,
    DEPTH,
    OWN,
    RANK,
    RECENT,
    TEMPERATURE,
)
from vllm_specinfer.tree.token_tree import ROOT


class Chooser:
    """Children whose chances nobody has heard before."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def num_candidates(self, width, rows):
        return width

    def choose(self, logprobs, tokens, width, rows):
        shape = len(rows.nodes), width
        return SimpleNamespace(
            scores=np.sort(np.log(self.rng.random(shape)))[:, ::-1],
            tokens=np.tile(np.arange(width), (len(rows.nodes), 1)),
            draws=None,
        )


def test_a_predictor_hears_of_each_node_and_of_all_above_it():
    num_reqs, temperatures = 3, np.array([0.0, 1.0, 0.5])
    ssm = SimpleNamespace(
        kv=SimpleNamespace(capacity=lambda slots, num_tokens: np.full(num_reqs, 99)),
        max_model_len=99,
        likeliest=lambda hidden, count: (None, None),
        run_level=lambda frontier, slots, num_tokens: None,
    )
    budget = SimpleNamespace(worth=lambda: EVERYTHING)
    source = NeuralSource(ssm, Chooser(), BestFirstTree(4, 3, 0.0), 12, budget)
    recent = np.array([0.25, 0.5, 0.75])
    source.predictor = SimpleNamespace(
        guesses=SimpleNamespace(recent=lambda slots: recent),
        corrected=lambda features: features[..., OWN],
    )
    zeros = np.zeros(num_reqs, np.int64)
    roots = DraftRows(
        *(zeros, zeros, zeros, zeros + ROOT, temperatures, zeros, zeros, zeros)
    )
    step = SimpleNamespace(
        slots=np.arange(num_reqs),
        num_tokens=np.full(num_reqs, 5),
        growing=np.arange(num_reqs),
        roots=roots,
    )
    found = source._grown(None, step, np.full(num_reqs, -np.inf), 99)
    trees, features = found.candidates, found.features
    deepest = 0
    for r, c in zip(*np.nonzero(np.isfinite(trees.scores)), strict=True):
        parent, seen = trees.parents[r, c], features[r, c]
        above, depth = 0.0, 1
        if parent != ROOT:
            above = features[r, parent, OWN] + features[r, parent, ABOVE]
            depth = features[r, parent, DEPTH] + 1
        assert np.isclose(seen[ABOVE], above) and seen[DEPTH] == depth
        # Its score is the chance of its whole path.
        assert np.isclose(trees.scores[r, c], seen[OWN] + seen[ABOVE], rtol=1e-5)
        assert seen[RANK] == trees.tokens[r, c]
        assert [seen[TEMPERATURE], seen[RECENT]] == [temperatures[r], recent[r]]
        deepest = max(deepest, depth)
    assert deepest == 4
