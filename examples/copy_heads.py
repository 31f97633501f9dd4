"""First weights with which an SSM copies from its context.

Much of what a small target writes repeats its context: after two tokens that occurred
before, it usually goes on as it did then. Gradient descent finds that lookup late, so
training starts from weights that have it. Layer 0 writes codes of the last tokens into
reserved channels; layer 1 attends to the position whose two previous tokens have the
codes of the current and the last token, and copies the token there.

H hidden size, C = H - 65 content channels; then 32 channels of the codes before a
position (KEY), 32 of the codes up to it (QUERY), and one constant.
"""

import math

import torch

HEAD_DIM = 64
CODE = 32
RESERVED = 2 * CODE + 1
COMMON = 8192  # byte-pair merges come by frequency: the first tokens are the commonest
FAST = 6  # rotary frequencies that tell neighbouring positions apart
POSITION_SCORE = 150.0
MATCH_SCORE = 16.0
COPY = 10.0


def token_codes(normed: torch.Tensor, num_content: int) -> torch.Tensor:
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
def write_copy_heads(ssm, embedding: torch.Tensor) -> None:
    """Write the lookup into the first two layers.

    Args:
        ssm: Fresh LlamaForCausalLM with 8 heads and 4 KV heads of 64 channels.
        embedding: [V, H] its embedding: zero in KEY and QUERY, constant at the end.
    """
    hidden = ssm.config.hidden_size
    num_content = hidden - RESERVED
    if num_content > 3 * HEAD_DIM:
        raise ValueError(
            f"hidden must be at most {3 * HEAD_DIM + RESERVED}, three heads copy "
            f"{HEAD_DIM} channels each; got {hidden}"
        )
    key = slice(num_content, num_content + CODE)
    query = slice(num_content + CODE, hidden - 1)
    # The constant outweighs the content, so RMSNorm divides all positions by about the
    # same; the norms' weights then bring the content back to 1.
    rms = embedding[:COMMON, :num_content].pow(2).mean().sqrt()
    largest = embedding[0, -1]
    for norm in ssm.modules():
        if type(norm).__name__ == "LlamaRMSNorm":
            norm.weight.fill_(largest / math.sqrt(hidden) / rms)
            norm.weight[-1] = 1 / math.sqrt(hidden)
    normed = embedding[:COMMON] / rms
    normed[:, -1] = 1
    codes = token_codes(normed, num_content)
    half = HEAD_DIM // 2
    frequency = ssm.config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    first, second = (layer.self_attn for layer in ssm.model.layers[:2])

    def heads(projection: torch.nn.Linear) -> torch.Tensor:
        """The projection's rows by head."""
        return projection.weight.view(-1, HEAD_DIM, hidden)

    def outputs(projection: torch.nn.Linear) -> torch.Tensor:
        """The output projection's columns by head: [H, heads, HEAD_DIM]."""
        return projection.weight.view(hidden, -1, HEAD_DIM)

    # Layer 0: KEY = a(t-1) + b(t-2), QUERY = a(t) + b(t-1).
    size = math.sqrt(CODE) * rms
    constant = math.sqrt(POSITION_SCORE)
    heads(first.k_proj)[2:] = 0
    heads(first.k_proj)[2:, :FAST, -1] = constant
    heads(first.v_proj)[2:] = codes
    a, b = slice(0, CODE), slice(CODE, 2 * CODE)
    outputs(first.o_proj)[:, 4:] = 0
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
    for kv_head in (1, 2, 3):
        start = (kv_head - 1) * HEAD_DIM
        channels = torch.arange(start, min(start + HEAD_DIM, num_content))
        place = channels - start
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
        outputs(second.o_proj)[channels, 2 * kv_head, place] = COPY * rms
