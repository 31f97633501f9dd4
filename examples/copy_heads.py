"""Attention heads that copy, written by hand into a two-layer SSM before training.

Most of what a small target writes repeats its context: after two tokens that occurred
before, it usually continues as it did then. Two layers can express that lookup, but
gradient descent finds it late. So layer 0 writes codes of the two previous tokens into
reserved channels, and layer 1 attends to the position whose two previous tokens have
the codes of the current and the last token, and copies the token there.

H hidden size, C = H - 65 content channels; then 1 constant channel, 32 channels of the
codes before a position (KEY) and 32 of the codes up to it (QUERY).
"""

import math

import torch

HEAD_DIM = 64
CODE = 32
RESERVED = 1 + 2 * CODE
FAST = 12  # rotary frequencies that tell neighbouring positions apart
POSITION_SCORE = 150.0
MATCH_SCORE = 10.0


def token_codes(normed: torch.Tensor, num_content: int) -> torch.Tensor:
    """Linear map from a normed embedding to two near-orthogonal codes per token.

    Args:
        normed: [V', H] embeddings of common tokens after RMSNorm.
        num_content: C; channel C is constant and serves as the bias.

    Returns:
        [2 * CODE, C + 1] whose product with an embedding has two parts of norm about 1.
    """
    content = normed[:, :num_content]
    mean = content.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov((content - mean).T, correction=0))
    scale = (values + 0.02 * values.mean()).rsqrt()
    whiten = vectors @ torch.diag(scale) @ vectors.T
    mix = torch.linalg.qr(torch.randn(num_content, num_content))[0][: 2 * CODE]
    codes = mix @ whiten
    bias = -(codes @ mean) / normed[:, num_content].mean()
    codes = torch.cat([codes, bias[:, None]], dim=1)
    norms = (normed[:, : num_content + 1] @ codes[:CODE].T).norm(dim=1)
    return codes / norms.mean()


@torch.no_grad()
def write_copy_heads(ssm, common: torch.Tensor) -> None:
    """Write the copying circuit into a fresh SSM with heads of 64 channels.

    Args:
        ssm: Two-layer LlamaForCausalLM, 8 heads, 4 KV heads; changed in place.
        common: [V'] ids of the tokens whose codes must differ most.
    """
    hidden = ssm.config.hidden_size
    num_content = hidden - RESERVED
    content = slice(0, num_content)
    key = slice(num_content + 1, num_content + 1 + CODE)
    query = slice(num_content + 1 + CODE, hidden)
    embedding = ssm.model.embed_tokens.weight
    embedding[:, num_content:] = 0
    embedding[:, num_content] = 1.5 * embedding.pow(2).mean().sqrt()
    rms = embedding[common].pow(2).mean(-1, keepdim=True).sqrt()
    normed = embedding[common] / rms
    codes = token_codes(normed, num_content)
    constant = normed[:, num_content].mean()
    theta = ssm.config.rope_parameters["rope_theta"]
    half = HEAD_DIM // 2
    frequency = theta ** (-torch.arange(half) / half)

    def head(weight, n):
        return weight[n * HEAD_DIM : (n + 1) * HEAD_DIM]

    def attend_back(attention, n, distance):
        size = math.sqrt(POSITION_SCORE) / constant
        angle = distance * frequency[:FAST]
        rows = head(attention.q_proj.weight, n)
        rows.zero_()
        rows[:FAST, num_content] = size * torch.cos(angle)
        rows[half : half + FAST, num_content] = -size * torch.sin(angle)
        rows = head(attention.k_proj.weight, n // 2)
        rows.zero_()
        rows[:FAST, num_content] = size

    first, second = (layer.self_attn for layer in ssm.model.layers)
    for layer in ssm.model.layers:
        layer.self_attn.o_proj.weight[num_content:] = 0
        layer.mlp.down_proj.weight[num_content:] = 0
    # Layer 0: KEY = a(t-1) + b(t-2), QUERY = a(t) + b(t-1).
    size = 2.0 * rms.mean()
    a, b = slice(0, CODE), slice(CODE, 2 * CODE)
    for kv_head in (2, 3):
        rows = head(first.v_proj.weight, kv_head)
        rows.zero_()
        rows[:, : num_content + 1] = codes
    eye = size * torch.eye(CODE)
    out = first.o_proj.weight
    out[:, 4 * HEAD_DIM :] = 0
    for n, distance, writes in (
        (4, 1, ((key, a), (query, b))),
        (5, 2, ((key, b),)),
        (6, 0, ((query, a),)),
        (7, 3, ()),
    ):
        attend_back(first, n, distance)
        for channels, part in writes:
            columns = slice(n * HEAD_DIM + part.start, n * HEAD_DIM + part.stop)
            out[channels, columns] = eye
    # Layer 1: match the codes on the slow rotary channels, copy the token found.
    rms_1 = (rms.mean() ** 2 + 4 * size**2 / hidden).sqrt()
    gain = math.sqrt(MATCH_SCORE * math.sqrt(HEAD_DIM)) * rms_1 / size
    slow = torch.cat(
        [torch.arange(half // 2, half), torch.arange(half // 2, half) + half]
    )
    identity = torch.zeros(HEAD_DIM, CODE)
    identity[slow] = gain * torch.eye(CODE)
    common_content = embedding[common, :num_content]
    _, _, directions = torch.linalg.svd(
        common_content - common_content.mean(0), full_matrices=False
    )
    for i, kv_head in enumerate((2, 3)):
        basis = directions[i * HEAD_DIM : (i + 1) * HEAD_DIM]
        for weight in (second.k_proj.weight, second.v_proj.weight):
            head(weight, kv_head).zero_()
        head(second.k_proj.weight, kv_head)[:, key] = identity
        head(second.v_proj.weight, kv_head)[:, content] = basis
        for n, share in ((2 * kv_head, 1.5), (2 * kv_head + 1, 0.5)):
            head(second.q_proj.weight, n).zero_()
            head(second.q_proj.weight, n)[:, query] = identity
            columns = slice(n * HEAD_DIM, (n + 1) * HEAD_DIM)
            second.o_proj.weight[content, columns] = share * rms_1 * basis.T
    # Layer 1 also takes the current token out again: it rarely comes twice.
    for i, kv_head in enumerate((0, 1)):
        basis = directions[i * HEAD_DIM : (i + 1) * HEAD_DIM]
        attend_back(second, 2 * kv_head, 0)
        head(second.v_proj.weight, kv_head).zero_()
        head(second.v_proj.weight, kv_head)[:, content] = basis
        columns = slice(2 * kv_head * HEAD_DIM, (2 * kv_head + 1) * HEAD_DIM)
        second.o_proj.weight[content, columns] = -rms_1 * basis.T
