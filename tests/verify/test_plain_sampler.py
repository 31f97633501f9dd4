"""What is changed in vLLM's own sampler, which draws the tokens of plain rows."""

from types import SimpleNamespace
from unittest import mock

import torch

from vllm_specinfer import model_state


def test_draws_are_those_that_drafts_foresee():
    """vLLM draws by FlashInfer where it can, and then not by a request's seed."""
    state = model_state.TreeModelState.__new__(model_state.TreeModelState)
    state.device, state._drafter = torch.device("cpu"), mock.Mock()
    state._positions = state._tests_draws = None
    sampler = SimpleNamespace(use_flashinfer=True)
    with mock.patch.object(model_state, "TreeSampler"):
        plain, _ = state.custom_sampler(sampler)
    assert plain is sampler and not plain.use_flashinfer
