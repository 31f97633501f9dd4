"""Masks that forbid nothing cost nothing."""

import numpy as np
import torch

from vllm_specinfer.kernels.cpu.logits_processors import apply_grammar_bitmask


def test_only_rows_in_which_something_is_forbidden_are_written():
    masks = np.full((4, 3), -1, np.int32)
    places, starts = torch.tensor([0, 1, 3, 4]), torch.tensor([0, 2, 3])
    written = []
    for forbidden in ([], [(1, 70)], [(1, 70), (2, 0), (3, 5)]):
        for row, token in forbidden:
            masks[row, token // 32] &= ~(1 << token % 32)
        logits = torch.zeros(3, 90)
        given = (logits, 90, places, starts, torch.from_numpy(masks), 3, 90)
        apply_grammar_bitmask(*given, MASK_STRIDE=3)
        written.append((logits._version, logits.isinf().nonzero().tolist()))
    # The last place is behind the end of its request.
    assert written == [(0, []), (1, [[1, 70]]), (2, [[1, 70], [2, 0]])]
