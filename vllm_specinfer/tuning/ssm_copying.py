"""First weights with which a new SSM copies from its context.

Much of what a target writes repeats its context: after two tokens that occurred
before, it usually goes on as it did then. Gradient descent finds that lookup late, so
training starts from weights that have it. Layer 0 writes codes of the last tokens into
reserved channels; layer 1 attends to the position whose two previous tokens have the
codes of the current and the last token, and copies the token there.

Dimension legend: V tokens, V' common ones, H hidden size, C = H - 65 channels of
content; after them 32 of the codes before a position (KEY), 32 of the codes up to it
(QUERY), and one constant.
"""

import math

import torch
from transformers import LlamaModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

HEAD_DIM = 64
CODE = 32
RESERVED = 2 * CODE + 1
# Byte-pair merges come by frequency: the first tokens are the commonest.
COMMON = 8192
# Rotary frequencies that tell neighbouring positions apart.
FAST = 6
# Attention scores of the position at the wanted distance, and of a match.
POSITION_SCORE, MATCH_SCORE = 150.0, 16.0
# How much a copied token outweighs what the rest of the SSM says of it.
COPY_STRENGTH = 10.0


def num_kv_heads(hidden: int) -> int:
    """Of each layer, with two query heads each: one, and as many as copy content; a
    power of two, which tensor parallelism and transformers want."""
    wanted = 1 + math.ceil((hidden - RESERVED) / HEAD_DIM)
    return max(4, 1 << (wanted - 1).bit_length())


def _token_codes(normed: torch.Tensor, num_content: int) -> torch.Tensor:
    """Linear map from a normed embedding to two near-orthogonal codes per token.

    Args:
        normed: [V', H] embeddings of common tokens after RMSNorm.
        num_content: C; the last channel is constant and serves as the bias.

    Returns:
        [2 * CODE, H]; either half of its product with an embedding has a norm of
        about 1.
    """
    content = normed[:, :num_content]
    mean = content.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov((content - mean).T, correction=0))
    scale = (values + 0.02 * values.mean()).rsqrt()
    whiten = vectors @ torch.diag(scale) @ vectors.T
    mix = torch.linalg.qr(torch.randn(num_content, num_content))[0][: 2 * CODE]
    codes = torch.zeros(2 * CODE, normed.shape[1])
    codes[:, :num_content] = mix @ whiten
    codes[:, -1] = -(mix @ whiten @ mean)
    return codes / (normed @ codes[:CODE].T).norm(dim=1).mean()


@torch.no_grad()
def write_copy_heads(model: LlamaModel, embedding: torch.Tensor) -> None:
    """Write the lookup into the first two layers.

    Args:
        model: A new one of at least two layers, with `num_kv_heads` KV heads of 64
            channels and two query heads for each.
        embedding: [V, H] its embedding: zero in KEY and QUERY, constant at the end.
    """
    hidden = model.config.hidden_size
    num_content = hidden - RESERVED
    key = slice(num_content, num_content + CODE)
    query = slice(num_content + CODE, hidden - 1)
    # The constant outweighs the content, so RMSNorm divides all positions by about the
    # same; the norms' weights then bring the content back to 1.
    rms = embedding[:COMMON, :num_content].pow(2).mean().sqrt()
    largest = embedding[0, -1]
    for norm in model.modules():
        if isinstance(norm, LlamaRMSNorm):
            norm.weight.fill_(largest / math.sqrt(hidden) / rms)
            norm.weight[-1] = 1 / math.sqrt(hidden)
    normed = embedding[:COMMON] / rms
    normed[:, -1] = 1
    codes = _token_codes(normed, num_content)
    half = HEAD_DIM // 2
    theta = model.config.rope_parameters["rope_theta"]
    frequency = theta ** (-torch.arange(half) / half)
    first, second = (layer.self_attn for layer in model.layers[:2])

    def heads(projection: torch.nn.Linear) -> torch.Tensor:
        """The projection's rows by head."""
        return projection.weight.view(-1, HEAD_DIM, hidden)

    def outputs(projection: torch.nn.Linear) -> torch.Tensor:
        """The output projection's columns by head: [H, heads, HEAD_DIM]."""
        return projection.weight.view(hidden, -1, HEAD_DIM)

    # Layer 0: KEY = a(t-1) + b(t-2), QUERY = a(t) + b(t-1).
    size = math.sqrt(CODE) * rms
    constant = math.sqrt(POSITION_SCORE)
    heads(first.k_proj)[2:4] = 0
    heads(first.k_proj)[2:4, :FAST, -1] = constant
    heads(first.v_proj)[2:4] = codes
    a, b = slice(0, CODE), slice(CODE, 2 * CODE)
    outputs(first.o_proj)[:, 4:8] = 0
    for n, distance, writes in (
        (4, 1, ((key, a), (query, b))),
        (5, 2, ((key, b),)),
        (6, 0, ((query, a),)),
    ):
        angle = distance * frequency[:FAST]
        rows = heads(first.q_proj)[n]
        rows.zero_()
        rows[:FAST, -1] = constant * torch.cos(angle)
        rows[half : half + FAST, -1] = -constant * torch.sin(angle)
        for channels, part in writes:
            outputs(first.o_proj)[channels, n, part] = size * torch.eye(CODE)

    # Layer 1: match the codes on the slow rotary channels, copy the content.
    gain = math.sqrt(MATCH_SCORE * math.sqrt(HEAD_DIM)) * rms / size
    slow = torch.cat([torch.arange(half // 2, half)] * 2)
    slow[half // 2 :] += half
    identity = torch.zeros(HEAD_DIM, CODE)
    identity[slow] = gain * torch.eye(CODE)
    # What raises a token's own logit above the others': its content, whitened twice.
    content = normed[:, :num_content]
    spread = torch.cov(content.T, correction=0)
    spread += 0.02 * spread.diagonal().mean() * torch.eye(num_content)
    raising = torch.zeros(num_content, hidden)
    raising[:, :num_content] = torch.linalg.inv(spread)
    raising[:, -1] = -raising[:, :num_content] @ content.mean(0)
    raising /= (normed @ raising.T).pow(2).mean().sqrt()
    for kv_head, channels in enumerate(torch.arange(num_content).split(HEAD_DIM), 1):
        place = channels % HEAD_DIM
        for rows in (
            heads(second.k_proj)[kv_head],
            heads(second.v_proj)[kv_head],
            heads(second.q_proj)[2 * kv_head],
        ):
            rows.zero_()
        heads(second.k_proj)[kv_head][:, key] = identity
        heads(second.q_proj)[2 * kv_head][:, query] = identity
        heads(second.v_proj)[kv_head][place] = raising[channels]
        outputs(second.o_proj)[:, 2 * kv_head] = 0
        outputs(second.o_proj)[channels, 2 * kv_head, place] = COPY_STRENGTH * rms
