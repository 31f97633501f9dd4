"""The rounds of boost-tuning, one SSM each, and the pool folder they leave behind.

Everything that takes long is written down when it is done, and whole or not at all: a
killed run goes on where it was when the same command is given again.
"""

import csv
import functools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_specinfer.draft_vocab import DRAFT_VOCAB_FILE, draft_vocab_of
from vllm_specinfer.options import SuffixSource
from vllm_specinfer.parse_sources import MANIFEST
from vllm_specinfer.results import write_json
from vllm_specinfer.tuning import model
from vllm_specinfer.tuning.data import TrainingData, prepare
from vllm_specinfer.tuning.failures import in_a_sentence
from vllm_specinfer.tuning.new_ssm import NewSSM, check_hidden
from vllm_specinfer.tuning.optimizer import MuonAdamW
from vllm_specinfer.tuning.plots import CURVES_FILE, plot_curves
from vllm_specinfer.tuning.readable import check_readable
from vllm_specinfer.tuning.settings import PoolSettings
from vllm_specinfer.tuning.training import fit

ROUND_FILE = "round.json"


@dataclass(frozen=True)
class Round:
    """What one round did.

    Attributes:
        ssm: Folder name of its SSM.
        num_windows: Windows it was trained on.
        losses: Step and training loss.
        hit_rate: Part of the validation tokens that are this SSM's likeliest.
        pool_hit_rate: Part that is the likeliest of this or an earlier SSM.
        marked: Part of the training windows that some SSM continues by now.
    """

    ssm: str
    num_windows: int
    losses: list[tuple[int, float]]
    hit_rate: float
    pool_hit_rate: float
    marked: float


@in_a_sentence()
def tune(out: Path, settings: PoolSettings) -> list[Round]:
    """Tune a pool, or go on with one.

    Args:
        out: The pool folder.
        settings: What to tune.

    Returns:
        The rounds; fewer than asked for where nothing is left to learn.

    Raises:
        ValueError: The input cannot be used; finished rounds are kept.
        OSError: A file is missing or broken, or disk or memory are full; finished
            rounds are kept.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    if settings.base is None:
        check_hidden(settings.hidden, settings.target)
        check_readable(settings.target)
    else:
        check_readable(settings.base, "the base")
        _check_base(settings.base, settings.target, tokenizer)
    data = prepare(out, settings, tokenizer)
    return _Pool(out, settings, tokenizer, data).run()


class _Pool:
    def __init__(
        self,
        out: Path,
        settings: PoolSettings,
        tokenizer: Any,
        data: TrainingData,
    ) -> None:
        self._out, self._settings, self._tokenizer = out, settings, tokenizer
        self._training, self._validation = data.training, data.validation
        self._draft_vocab = torch.tensor(data.draft_vocab)
        length = settings.compare_length
        self._marks = [
            np.zeros(-(-len(s.answer) // length), bool) for s in self._training
        ]
        self._pool_hits = [np.zeros(len(s.answer), bool) for s in self._validation]

    def run(self) -> list[Round]:
        rounds: list[Round] = []
        for number in range(self._settings.num_ssms):
            if all(marked.all() for marked in self._marks):
                print("every window is marked: no further SSM is needed", flush=True)
                break
            marked = rounds[-1].marked if rounds else 0.0
            folder = self._out / f"ssm{number}"
            if not (folder / ROUND_FILE).is_file():
                # Not before: who uses a pool that grows must not miss an SSM of it.
                _write_pool(self._out, rounds)
                self._tune_one(number, folder)
            rounds.append(self._finish(folder))
            print(
                f"{folder.name}: {rounds[-1].hit_rate:.3f} of the validation tokens, "
                f"the pool {rounds[-1].pool_hit_rate:.3f}; "
                f"{rounds[-1].marked:.0%} of the windows marked",
                flush=True,
            )
            is_last = number + 1 == self._settings.num_ssms
            if rounds[-1].marked == marked and not (is_last or self._keeps(number)):
                print(
                    f"{folder.name} continues no further window as the target does: "
                    "the next SSM would be the same",
                    flush=True,
                )
                break
        _write_pool(self._out, rounds)
        return rounds

    def _keeps(self, number: int) -> bool:
        """The SSM of this round is the base as it is."""
        return not number and self._settings.keep_base

    def _tune_one(self, number: int, folder: Path) -> None:
        settings = self._settings
        data = model.Windows(self._training, self._marks, settings.compare_length)
        num_windows = int(sum((~marked).sum() for marked in self._marks))
        print(
            f"round {number + 1} of {settings.num_ssms}: {num_windows} windows of "
            f"{len(data)} continuations",
            flush=True,
        )
        checkpoints = self._out / "checkpoints" / folder.name
        if self._keeps(number):
            ssm, vocab, losses = *model.base_as_it_is(settings.base), []
        else:
            ssm, losses = self._trained(data, checkpoints)
            vocab = self._draft_vocab.tolist() if settings.draft_vocab else None
        unfinished = self._out / "checkpoints" / f"{folder.name}.unfinished"
        ssm.save_pretrained(unfinished)
        self._tokenizer.save_pretrained(unfinished)
        if vocab is not None:
            write_json(unfinished / DRAFT_VOCAB_FILE, {"tokens": vocab})
        write_json(
            unfinished / ROUND_FILE, {"num_windows": num_windows, "losses": losses}
        )
        unfinished.rename(folder)
        shutil.rmtree(checkpoints, ignore_errors=True)

    def _trained(
        self, data: model.Windows, checkpoints: Path
    ) -> tuple[torch.nn.Module, list[tuple[int, float]]]:
        """An SSM in bfloat16, its steps and losses."""
        settings = self._settings
        ssm = model.first_weights(settings)
        loss = functools.partial(model.loss, draft_vocab=self._draft_vocab)
        collate = model.collate if settings.base else model.collate_for_new
        losses = fit(ssm, loss, data, collate, settings, checkpoints, MuonAdamW)
        if isinstance(ssm, NewSSM):
            ssm = ssm.finished()
        return ssm.to(torch.bfloat16), losses

    def _vocab_of(self, folder: Path, vocab_size: int) -> torch.Tensor:
        """What an SSM of this pool drafts, ascending."""
        tokens = draft_vocab_of(str(folder), None, vocab_size)
        if tokens is None:
            return torch.arange(min(len(self._tokenizer), vocab_size))
        return torch.tensor(sorted(tokens))

    def _finish(self, folder: Path) -> Round:
        """Mark what a tuned SSM continues as the target does."""
        from transformers import AutoModelForCausalLM

        ssm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if torch.cuda.is_available():
            ssm = ssm.cuda()
        size = self._settings.batch_size
        length = self._settings.compare_length
        vocab = self._vocab_of(folder, ssm.config.vocab_size)
        found = model.hits(ssm, self._training, vocab, size)
        for marked, hit in zip(self._marks, found, strict=True):
            marked |= model.windows_hit(hit, length)
        own = model.hits(ssm, self._validation, vocab, size)
        for pooled, hit in zip(self._pool_hits, own, strict=True):
            pooled |= hit
        return Round(
            folder.name,
            **json.loads((folder / ROUND_FILE).read_text()),
            hit_rate=float(np.concatenate(own).mean()),
            pool_hit_rate=float(np.concatenate(self._pool_hits).mean()),
            marked=float(np.concatenate(self._marks).mean()),
        )


def _check_base(base: str, target: str, tokenizer: Any) -> None:
    """A base must have the target's tokenizer, as many rows of an embedding, and a
    head without more."""
    from transformers import AutoConfig, AutoTokenizer

    sizes = [
        AutoConfig.from_pretrained(folder).get_text_config().vocab_size
        for folder in (base, target)
    ]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"base must have the target's vocab_size, {sizes[1]}; got {sizes[0]} of "
            f"{base!r}"
        )
    if AutoTokenizer.from_pretrained(base).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"base must have the tokenizer of the target {target!r}; got another one "
            f"in {base!r}"
        )
    model.check_logits(base)


def _write_pool(out: Path, rounds: list[Round]) -> None:
    """The manifest and the curves of the rounds so far, if there are any."""
    if not rounds:
        return
    # A lookup foresees what repeats this or past texts, for next to nothing.
    ssms = [{"model": name} for name in (*(r.ssm for r in rounds), SuffixSource.name)]
    write_json(
        out / MANIFEST,
        {"ssms": ssms, "rounds": [{**vars(r), "losses": None} for r in rounds]},
    )
    with (out / CURVES_FILE).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["round", "step", "loss", "hit_rate", "pool_hit_rate", "marked"]
        )
        for number, r in enumerate(rounds, start=1):
            for step, loss in r.losses:
                writer.writerow([number, step, loss, "", "", ""])
            writer.writerow([number, "", "", r.hit_rate, r.pool_hit_rate, r.marked])
    plot_curves(
        out,
        {f"round {number}": r.losses for number, r in enumerate(rounds, start=1)},
        ("pool so far", [r.pool_hit_rate for r in rounds]),
        ("SSM", [r.hit_rate for r in rounds]),
        "round",
    )
