"""The SSM's output head: the likeliest next tokens of each hidden state.

Most of a tiny SSM's time goes into the rows of its head, nearly all of them for tokens
that hardly ever come next. An SSM may bring a file ``draft_vocab.json``,
``{"tokens": [ids]}``: then only those rows are multiplied, and no other token is
drafted. The output of the engine stays the target's either way. The head of an EAGLE
head may be the target's own, whose rows are copied again when its weights are others.
"""

from collections.abc import Callable

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_specinfer.device import is_host
from vllm_specinfer.draft_vocab import DRAFT_VOCAB_FILE, read_draft_vocab

logger = init_logger(__name__)

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Rows of which logits are in memory at once, some ten bytes for each token.
MOST_ROWS = 1024


class DraftHead:
    """Likeliest tokens by the model's own head, or by its rows of the draft vocabulary.

    Dimension legend: F rows, M tokens of each, V draft vocabulary.
    """

    def __init__(self, model: nn.Module, config: ModelConfig) -> None:
        """Read the draft vocabulary, if the SSM has one.

        Args:
            model: The loaded SSM.
            config: Its config.

        Raises:
            ValueError: The file of the draft vocabulary is wrong.
        """
        self._model = model
        self._tokens: torch.Tensor | None = None
        # The model's, of whose rows these are copies, if they are.
        self._copied: nn.Module | None = None
        head = getattr(model, "lm_head", None)
        processor = getattr(model, "logits_processor", None)
        plain = (
            getattr(head, "weight", None) is not None
            and _is_matrix(head)
            and getattr(head, "bias", None) is None
            and getattr(processor, "soft_cap", 0) is None
            and getattr(processor, "scale", 0) == 1.0
        )
        offsets = getattr(model, "draft_id_to_target_id", None)
        if offsets is not None:
            # An EAGLE-3 head whose rows are for a vocabulary of its own.
            if plain:
                own = torch.arange(len(offsets), device=offsets.device)
                self._tokens, order = (own + offsets.data).sort()
                self._keep(_rows_of(head, order))
            return
        tokens = read_draft_vocab(config)
        if tokens is None:
            return
        if not plain or _vocab_size_of(head) < config.get_vocab_size():
            logger.warning(
                "%s of the SSM %r is not used: its head is quantised, scaled, capped "
                "or biased",
                DRAFT_VOCAB_FILE,
                config.model,
            )
            return
        # Ascending, so that ties go to the lowest token as they do in the full head.
        self._tokens = torch.tensor(sorted(tokens), device=head.weight.device)
        self._keep(_rows_of(head, self._tokens))
        self._copied = head

    def copy_again(self) -> None:
        """Read the rows of a head that may have other weights by now.

        In place: captured graphs know where they are. All ranks must do it.
        """
        if self._copied is not None:
            rows, _ = _multiplied(_rows_of(self._copied, self._tokens))
            self._rows.copy_(rows)

    def _keep(self, rows: torch.Tensor) -> None:
        self._rows, self._linear = _multiplied(rows)
        # As buffers of the model they survive vLLM's sleep.
        for name, tensor in (("draft_rows", self._rows), ("draft_ids", self._tokens)):
            self._model.register_buffer(name, tensor, persistent=False)

    def likeliest(
        self, hidden: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest next tokens of each row, in descending order.

        Args:
            hidden: [F, H].
            count: M.

        Returns:
            log-probabilities [F, M] float32 and tokens [F, M] int64. A vocabulary of
            fewer than M tokens gives so many.
        """
        first, *parts = [self._likeliest(h, count) for h in hidden.split(MOST_ROWS)]
        if not parts:
            return first
        values, tokens = map(torch.cat, zip(first, *parts, strict=True))
        return values, tokens

    def _likeliest(
        self, hidden: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._tokens is None:
            logits = self._model.compute_logits(hidden)
        else:
            logits = self._linear(hidden.bfloat16(), self._rows)
        count = min(count, logits.shape[1])
        # One kernel; `logsumexp` is many, each of which wakes all threads.
        logprobs = logits.float().log_softmax(dim=-1)
        values, places = logprobs.topk(count, dim=-1)
        if self._tokens is None:
            return values, places
        tokens = self._tokens[places]
        if get_tp_group().world_size == 1:
            return values, tokens
        # Ranks may have compiled the SSM's last norm in ways that round apart. Both go
        # as one tensor, of a type that holds either's numbers.
        sent = torch.stack([values.double(), tokens.double()])
        values, tokens = _of_first_rank(sent)
        return values.float(), tokens.long()


def _of_first_rank(tensor: torch.Tensor) -> torch.Tensor:
    """What the first rank has in it, in place.

    By vLLM's own binding of NCCL where there is one: torch's calls what graphs may not
    capture (vllm/distributed/device_communicators/pynccl_wrapper.py).
    """
    group = get_tp_group()
    pynccl = getattr(group.device_communicator, "pynccl_comm", None)
    if pynccl is None or pynccl.disabled:
        return group.broadcast(tensor)
    pynccl.broadcast(tensor, 0)
    return tensor


def _multiplied(rows: torch.Tensor) -> tuple[torch.Tensor, Linear]:
    """Rows [n, H] as what multiplies by them takes them, and that."""
    # Drafts need no more precision, and the rows' bytes are what costs time.
    rows = rows.to(torch.bfloat16)
    if is_host(rows.device):
        from vllm_specinfer.kernels.cpu.linear import kernel_for

        if (kernel := kernel_for(rows)) is not None:
            return kernel.weight, kernel.linear
    return rows, nn.functional.linear


def _is_matrix(head: nn.Module) -> bool:
    """Its weight is as it was published, neither quantized nor packed for a kernel."""
    weight, width = head.weight, getattr(head, "embedding_dim", None)
    shaped = weight.dim() == 2 and width in (None, weight.shape[1])
    return weight.is_floating_point() and shaped


def _vocab_size_of(head: nn.Module) -> int:
    return getattr(head, "org_vocab_size", head.weight.shape[0])


def _rows_of(head: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[n, H] rows of these tokens, on every tensor-parallel rank all of them.

    So few rows are multiplied everywhere sooner than logits are gathered. They are
    summed on the host: vLLM's first all-reduce on the device may allocate a workspace,
    here in the pool of the weights, which sleep discards.
    """
    weight, shard = head.weight.data, getattr(head, "shard_indices", None)
    if shard is None:
        return weight[tokens]
    places = tokens - shard.org_vocab_start_index
    own = (places >= 0) & (tokens < shard.org_vocab_end_index)
    rows = weight[torch.where(own, places, 0)] * own[:, None]
    if (group := get_tp_group()).world_size == 1:
        return rows
    host_rows = rows.cpu()
    torch.distributed.all_reduce(host_rows, group=group.cpu_group)
    return host_rows.to(weight.device)
