"""The target's hidden states of its own continuations, kept on disk for every epoch.

Dimension legend: T tokens of a continuation, A layers that are read, H hidden size.
"""

import copy
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from vllm_specinfer.tuning.data import Sample
from vllm_specinfer.tuning.settings import check_disk

STATES_FILE = "states.bin"
BATCH_TOKENS = 2048


class States(torch.utils.data.Dataset):
    """Continuations with the target's states [T, (A + 1) * H] bfloat16.

    The states after each of A layers, then the normed output.
    """

    def __init__(self, file: Path, samples: Sequence[Sample], width: int) -> None:
        """Open a file that `write_states` has finished.

        Args:
            file: The file.
            samples: The samples it was written for, in their order.
            width: (A + 1) * H.
        """
        self._samples = list(samples)
        self.lengths = [len(s.prompt) + len(s.answer) for s in samples]
        self._ends = np.cumsum(self.lengths)
        self._states = np.memmap(file, np.int16, "r").reshape(-1, width)

    def part(self, first: int, last: int | None) -> "States":
        """The samples first to last, the last one excluded."""
        part = copy.copy(self)
        part._samples = self._samples[first:last]
        part.lengths, part._ends = self.lengths[first:last], self._ends[first:last]
        return part

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> tuple[Sample, torch.Tensor]:
        end = self._ends[i]
        rows = np.array(self._states[end - self.lengths[i] : end])
        return self._samples[i], torch.from_numpy(rows).view(torch.bfloat16)


def write_states(
    file: Path, target: nn.Module, layers: Sequence[int], samples: Sequence[Sample]
) -> States:
    """Run the target over the samples, going on where an earlier run stopped.

    Args:
        file: For the states.
        target: A transformers decoder without its head.
        layers: States after so many layers are kept.
        samples: The continuations.

    Raises:
        OSError: The disk is too small.
    """
    width = (len(layers) + 1) * target.config.get_text_config().hidden_size
    lengths = [len(s.prompt) + len(s.answer) for s in samples]
    written = file.stat().st_size // (2 * width) if file.exists() else 0
    check_disk(file.parent, (sum(lengths) - written) * 2 * width)
    first = int(np.searchsorted(np.cumsum(lengths), written, side="right"))
    with file.open("ab") as out, tqdm(total=sum(lengths), desc="states") as progress:
        os.ftruncate(out.fileno(), sum(lengths[:first]) * 2 * width)
        progress.update(sum(lengths[:first]))
        while first < len(samples):
            # As many as fit if all were as long as the longest.
            count = 1
            while (
                first + count < len(samples)
                and max(lengths[first : first + count + 1]) * (count + 1)
                <= BATCH_TOKENS
            ):
                count += 1
            batch = range(first, first + count)
            rows = _read(target, layers, [samples[i] for i in batch])
            out.write(rows.view(torch.int16).numpy().tobytes())
            progress.update(len(rows))
            first += count
    return States(file, samples, width)


@torch.inference_mode()
def _read(
    target: nn.Module, layers: Sequence[int], samples: Sequence[Sample]
) -> torch.Tensor:
    """States of all tokens of the samples, one after the other."""
    texts = [torch.tensor(s.prompt + s.answer) for s in samples]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True).to(target.device)
    out = target(ids, output_hidden_states=True, use_cache=False)
    kept = [out.hidden_states[i] for i in layers] + [out.last_hidden_state]
    states = torch.cat(kept, -1).to(torch.bfloat16).cpu()
    return torch.cat([s[: len(t)] for s, t in zip(states, texts, strict=True)])
