"""Temperature, min-p and the draw itself.

Each function takes the arguments of the vLLM kernel of the same name, in its order.

L logit rows, V vocabulary, M request rows (``max_num_reqs``).
"""

import numpy as np
import torch

from vllm_specinfer.kernels.cpu.gumbel import noised_argmax


def temperature(
    logits: torch.Tensor,  # [L, V] float32, in place
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [L]
    temperature: torch.Tensor,  # [M]
    vocab_size: int,
    **_: object,
) -> None:
    """Divide by the temperature; greedy rows keep their logits."""
    temps = temperature.numpy()[expanded_idx_mapping.numpy()]
    rows = logits.numpy()
    for i in np.flatnonzero((temps != 0.0) & (temps != 1.0)).tolist():
        np.divide(rows[i], temps[i], out=rows[i])


def min_p(
    logits: torch.Tensor,  # [L, V], in place
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [L]
    min_p: torch.Tensor,  # [M]
    vocab_size: int,
    **_: object,
) -> None:
    """Mask tokens less likely than ``min_p`` times the best one's probability."""
    ratios = min_p.numpy()[expanded_idx_mapping.numpy()]
    rows = np.flatnonzero(ratios != 0.0)
    logs = np.log(ratios[rows])
    for row, log in zip(rows.tolist(), logs.tolist(), strict=True):
        values = logits[row]
        values.masked_fill_(values < values.amax() + log, float("-inf"))


def gumbel_sample(
    local_argmax: torch.Tensor,  # [L, blocks]
    local_argmax_stride: int,
    local_max: torch.Tensor,  # [L, blocks]
    local_max_stride: int,
    logits_cache: torch.Tensor | None,  # [M, columns, V]
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col: torch.Tensor | None,  # scalar, or [L] with PER_TOKEN_COL
    logits_cache_source: torch.Tensor | None,  # [L, V]
    logits_cache_source_stride: int,
    logits: torch.Tensor,  # [L, V]
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [L], -1 for padding
    seeds: torch.Tensor,  # [M]
    pos: torch.Tensor,  # [L]
    temp: torch.Tensor,  # [M]
    vocab_size: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
    **_: object,
) -> None:
    """Sample each row; the host then reduces over blocks.

    The whole row is one block here: the first column holds the winner.

    Raises:
        ValueError: Drafts are to be drawn, logits to be kept, or noise is float64: no
            engine with specinfer does that here.
    """
    if logits_cache is not None or IS_DRAFTING or USE_FP64:
        raise ValueError(
            "logits_cache, IS_DRAFTING and USE_FP64 must not be set on a CPU; got "
            f"{logits_cache is not None}, {IS_DRAFTING} and {USE_FP64}"
        )
    requests = expanded_idx_mapping.numpy()
    temps = np.where(requests >= 0, temp.numpy()[requests], np.float32(0.0))
    if not APPLY_TEMPERATURE:
        temps = (temps != 0).astype(np.float32)
    winners, values = noised_argmax(
        logits.float().numpy(), temps, seeds.numpy()[requests], pos.numpy()
    )
    local_argmax.numpy()[:, 0] = winners
    local_max.fill_(-torch.inf)
    local_max.numpy()[:, 0] = values
