"""First weights of an EAGLE-3 head that goes on as its context went on before.

After two tokens that occurred before, a small target mostly repeats what came next.
Gradient descent finds that lookup late, so training starts from weights that have it:
some attention heads compare codes of the last two tokens with codes of every two tokens
before, and copy the token after those. The embedding gives the code of the newest
token; a linear readout of the target's states, fitted here, gives those of the others,
and `fc` carries it in directions that the states hardly use.

Dimension legend: n tokens, H hidden size, A layers of the target that are read, D head
size, C = D / 4 channels of a token's code, V' common tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

from vllm_specinfer.tuning.data import Sample
from vllm_specinfer.tuning.eagle import EagleHead

# Byte-pair merges come by frequency: the first tokens are the commonest.
COMMON = 8192
# Attention score of a token that matches; both together have twice as much.
MATCH_SCORE = 16.0
# How much a copied token outweighs what the rest of the head says of it.
COPY_STRENGTH = 13.0
# A code's part of a state's norm.
CODE_NORM = 0.3
RIDGE = 1e-3


@torch.no_grad()
def write_copy_heads(
    head: EagleHead,
    target: nn.Module,
    rows: Sequence[tuple[Sample, torch.Tensor]],
) -> None:
    """Write the lookup into two thirds of the KV heads and their query heads.

    Args:
        head: A head with its first weights, on the CPU.
        target: Its target, with one table for embedding and head.
        rows: Continuations and the target's states [T, (A + 1) * H] of them, for the
            readout.
    """
    config, layer = head.config, head.midlayer
    size, dim = config.hidden_size, config.head_dim
    num_code = dim // 4
    embedding = target.get_input_embeddings().weight.float().cpu()
    normed = embedding / embedding.pow(2).mean(1, keepdim=True).sqrt()
    layer.input_layernorm.weight.fill_(1)
    mean = normed[:COMMON].mean(0)
    # There is no bias, so what all embeddings share must not count.
    normed = normed - normed @ torch.outer(mean, mean) / mean.dot(mean)
    values, vectors = torch.linalg.eigh(torch.cov(normed[:COMMON].T))
    to_code = _code(normed[:COMMON], values, vectors, num_code)
    codes = normed @ to_code.T
    texts = [torch.tensor(s.prompt + s.answer) for s, _ in rows]
    states = torch.cat([s[1:, :-size].float() for _, s in rows])
    wanted = [torch.cat([codes[t[1:]], codes[t[:-1]]], 1) for t in texts]
    readout = _fit(states, torch.cat(wanted))
    for part in (readout[:num_code], readout[num_code:]):
        part /= (states @ part.T).norm(dim=1).mean()
    last = states[:, -size:]
    free = torch.linalg.eigh(torch.cov(last.T))[1][:, : 2 * num_code]
    rms = last.pow(2).mean(1).sqrt().mean()
    length = CODE_NORM * rms * math.sqrt(size)
    weight = head.fc.weight
    weight[:, -size:] -= free @ free.T @ weight[:, -size:]
    weight += length * free @ readout
    # What the norm makes of a code of length one, undone.
    normed_length = length / (rms * math.sqrt(1 + 2 * CODE_NORM**2))
    read = free.T / layer.hidden_norm.weight / normed_length
    scale = math.sqrt(MATCH_SCORE * math.sqrt(dim))
    attention, num_kv = layer.self_attn, config.num_key_value_heads
    per_kv = config.num_attention_heads // num_kv
    # Half of a head's channels, those that positions rotate least.
    quarter = torch.arange(dim // 4, dim // 2)
    slow = torch.cat([quarter, quarter + dim // 2])
    newest, before = slow[::2], slow[1::2]
    num_copying = min(max(1, 2 * num_kv // 3), size // dim)
    # The directions in which embeddings differ most.
    bases = vectors.flip(1).T[: num_copying * dim].split(dim)
    strength = COPY_STRENGTH * rms / per_kv / head.norm.weight[:, None]
    for kv, basis in enumerate(bases):
        channels = slice(kv * dim, (kv + 1) * dim)
        attention.k_proj.weight[channels] = 0
        attention.k_proj.weight[kv * dim + newest, size:] = scale * read[:num_code]
        attention.k_proj.weight[kv * dim + before, size:] = scale * read[num_code:]
        attention.v_proj.weight[channels] = 0
        attention.v_proj.weight[channels, :size] = basis
        for first in range(kv * per_kv * dim, (kv + 1) * per_kv * dim, dim):
            own = slice(first, first + dim)
            attention.q_proj.weight[own] = 0
            attention.q_proj.weight[first + newest, :size] = scale * to_code
            attention.q_proj.weight[first + before, size:] = scale * read[:num_code]
            attention.o_proj.weight[:, own] = strength * basis.T


def _code(
    normed: torch.Tensor, values: torch.Tensor, vectors: torch.Tensor, num_code: int
) -> torch.Tensor:
    """[C, H] from an embedding to its code: nearly orthogonal, of length about one.

    Args:
        normed: [V', H] embeddings.
        values: [H] eigenvalues of their covariance.
        vectors: [H, H] its eigenvectors, in columns.
        num_code: C.
    """
    scale = (values + 0.02 * values.mean()).rsqrt()
    mix = torch.linalg.qr(torch.randn(len(values), num_code))[0].T
    code = mix @ vectors @ torch.diag(scale) @ vectors.T
    # The whitening amplifies the direction that was taken out.
    code = code - code @ vectors[:, :1] @ vectors[:, :1].T
    return code / (normed @ code.T).norm(dim=1).mean()


def _fit(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """[out, in] the linear map with the least squared error (ridge regression)."""
    gram = inputs.T @ inputs
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    return torch.linalg.solve(gram, inputs.T @ outputs).T
