"""An EAGLE-3 head in plain torch: what vLLM's Eagle3LlamaForCausalLM computes, trained.

Row j of the head reads the target's states of token j and the embedding of token j + 1,
and predicts token j + 2. At inference every deeper row reads the head's own state
instead of the target's, so training unrolls that ("training-time test" of EAGLE-3,
arXiv 2503.01840, section 3): step s of row j reads token j + 1 + s and the state of
step s - 1, and sees the rows of step 0 up to j and its own earlier steps.

Dimension legend: B continuations, T tokens of the longest, n rows of a step, H hidden
size, A layers of the target that are read, V' rows of the reduced head, S steps.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softmax
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from vllm_specinfer.tuning.data import Sample
from vllm_specinfer.tuning.precision import fast_dtype, mixed_precision

ARCHITECTURE = "LlamaForCausalLMEagle3"
# What a head has of its target's config, some of it by these names in few models only.
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rope_parameters",
    "rms_norm_eps",
)
# Kinds of positions that transformers and vLLM compute the same way.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Deeper steps are reached less often.
STEP_DECAY = 0.8


def head_config(target: PreTrainedConfig) -> LlamaConfig:
    """The config of a head with one layer of the target's sizes.

    As in published heads; the layers read are vLLM's default
    (vllm/model_executor/models/interfaces.py, SupportsEagle3). All channels are
    rotated, by the target's kind of positions where training and vLLM compute it the
    same way, else by the default one.

    Raises:
        ValueError: The target's layers are of another kind.
    """
    missing = [name for name in _SIZES if not hasattr(target, name)]
    if missing:
        raise ValueError(
            "the target of an EAGLE-3 head must have layers as Llama's; got "
            f"{target.model_type!r} without {', '.join(missing)}"
        )
    depth = target.num_hidden_layers
    # Not the last one: transformers gives it normed, vLLM as it is.
    layers = sorted({min(2, depth - 1), depth // 2, max(depth - 3, 0)})
    rope = target.rope_parameters or {}
    if rope.get("rope_type") not in _ROPE_TYPES:
        theta = rope.get("rope_theta", 10000.0)
        rope = {"rope_type": "default", "rope_theta": theta}
    own = {
        "num_hidden_layers": 1,
        "rope_parameters": {**rope, "partial_rotary_factor": 1.0},
    }
    return LlamaConfig(
        **{name: getattr(target, name) for name in _SIZES} | own,
        architectures=[ARCHITECTURE],
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        head_dim=getattr(target, "head_dim", None),
        tie_word_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        eagle_aux_hidden_state_layer_ids=layers,
        num_aux_hidden_states=len(layers),
    )


class EagleHead(nn.Module):
    """The head's own weights, by the names of EAGLE-3 checkpoints."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        num_aux = len(config.eagle_aux_hidden_state_layer_ids)
        self.fc = nn.Linear(num_aux * size, size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)

    def unroll(
        self, states: torch.Tensor, embeds: torch.Tensor, num_steps: int
    ) -> list[torch.Tensor]:
        """Normed outputs of every step that has any, [B, T - 1 - s, H] each.

        Args:
            states: [B, T, A * H] the target's states.
            embeds: [B, T, H] the tokens' embeddings.
            num_steps: S.
        """
        hidden = self.fc(states[:, :-1])
        keys: list[tuple[torch.Tensor, torch.Tensor]] = []
        outputs = []
        for step in range(min(num_steps, embeds.shape[1] - 1)):
            rows = embeds.shape[1] - 1 - step
            hidden = self.midlayer(
                embeds[:, 1 + step :], hidden[:, :rows], keys, first=step
            )
            outputs.append(self.norm(hidden))
        return outputs


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        keys: list[tuple[torch.Tensor, torch.Tensor]],
        first: int,
    ) -> torch.Tensor:
        normed = [self.input_layernorm(embeds), self.hidden_norm(hidden)]
        hidden = hidden + self.self_attn(torch.cat(normed, -1), keys, first)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, head = config.hidden_size, config.head_dim
        self._head_dim = head
        self._groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(2 * size, config.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(2 * size, config.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(2 * size, config.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head, size, bias=False)
        self._rotary = LlamaRotaryEmbedding(config)

    def forward(
        self,
        x: torch.Tensor,
        keys: list[tuple[torch.Tensor, torch.Tensor]],
        first: int,
    ) -> torch.Tensor:
        """Attend; `keys` holds K and V of the steps before, and gets this one's.

        Args:
            x: [B, n, 2H].
            keys: [B, heads, rows, head_dim] each.
            first: Position of the first row.
        """
        shape = (*x.shape[:2], -1, self._head_dim)
        q, k, v = (
            proj(x).view(shape).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        rows = x.shape[1]
        positions = torch.arange(first, first + rows, device=x.device)
        q, k = apply_rotary_pos_emb(q, k, *self._rotary(v, positions[None]))
        keys.append((repeat_kv(k, self._groups), repeat_kv(v, self._groups)))
        # Rows of step 0 up to j, and row j of the steps after it.
        (key, value), *own = keys
        scores = q @ key.transpose(2, 3)
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
        alone = [(q * k[:, :, :rows]).sum(-1, keepdim=True) for k, _ in own]
        scores = torch.cat([scores, *alone], -1).float() * self._head_dim**-0.5
        weights = softmax(scores, -1).to(value.dtype)
        out = weights[..., : key.shape[2]] @ value
        for place, (_, v) in enumerate(own, start=key.shape[2]):
            out = out + weights[..., place : place + 1] * v[:, :, :rows]
        return self.o_proj(out.transpose(1, 2).flatten(2))


def start_from_last_layer(head: EagleHead, target: nn.Module) -> None:
    """Begin with what turns the target's late states into its last ones.

    Args:
        head: A new head.
        target: A transformers decoder; where its last layer is no Llama's, the head
            keeps its random weights.
    """
    layers = target.base_model.layers
    theirs = layers[-1].state_dict()
    size = head.config.hidden_size
    with torch.no_grad():
        for name, own in head.midlayer.state_dict().items():
            given = theirs.get(name)
            if given is None or name == "input_layernorm.weight":
                continue
            if given.shape == own.shape:
                own.copy_(given)
            elif given.shape == (own.shape[0], size):
                own[:, size:] = given
        if "input_layernorm.weight" in theirs:
            head.midlayer.hidden_norm.weight.copy_(theirs["input_layernorm.weight"])
            head.norm.weight.copy_(target.base_model.norm.weight)
            nn.init.normal_(head.fc.weight, std=1e-3)
            head.fc.weight[:, -size:] += torch.eye(size)


class Teacher:
    """The target's embedding and its rows of the draft vocabulary."""

    def __init__(self, target: nn.Module, tokens: torch.Tensor) -> None:
        """Keep what a head shares with its target.

        Args:
            target: A transformers causal language model.
            tokens: [V'] the draft vocabulary, ascending.
        """
        self.tokens = tokens
        self.embed = target.get_input_embeddings().requires_grad_(False)
        self._rows = target.get_output_embeddings().weight.detach()[tokens]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of normed hidden states over the draft vocabulary."""
        return hidden.to(self._rows.dtype) @ self._rows.T


def collate(rows: Sequence[tuple[Sample, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded ids [B, T], states [B, T, (A + 1) * H], lengths [B]; padding at the end.

    Args:
        rows: Continuations and the target's states of their tokens.
    """
    texts = [torch.tensor(s.prompt + s.answer) for s, _ in rows]
    return {
        "ids": nn.utils.rnn.pad_sequence(texts, batch_first=True),
        "states": nn.utils.rnn.pad_sequence([s for _, s in rows], batch_first=True),
        "lengths": torch.tensor([len(text) for text in texts]),
    }


def loss(
    head: EagleHead, inputs: dict[str, torch.Tensor], teacher: Teacher, num_steps: int
) -> torch.Tensor:
    """Cross-entropy to the target, half of it to its likeliest token alone.

    Over every token of prompt and answer: the target has an opinion on all of them.
    """
    ids, lengths = inputs["ids"], inputs["lengths"]
    total = torch.zeros((), device=ids.device)
    with mixed_precision(ids.device):
        states, last = _split(head, inputs["states"])
        outputs = head.unroll(states, teacher.embed(ids), num_steps)
        for step, output in enumerate(outputs):
            places = torch.arange(output.shape[1], device=ids.device) + 1 + step
            valid = places < lengths[:, None]
            wanted = teacher.logits(last[:, 1 + step :][valid]).float()
            ours = teacher.logits(output[valid]).float()
            total = total + STEP_DECAY**step * _cross_entropy(ours, wanted)
    return total / sum(STEP_DECAY**step for step in range(num_steps))


def _split(head: EagleHead, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head reads [B, T, A * H], and the target's normed output [B, T, H]."""
    size = head.config.hidden_size
    states = states.to(fast_dtype(states.device))
    return states[..., :-size], states[..., -size:]


def _cross_entropy(ours: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    logprobs = ours.log_softmax(-1)
    soft = (softmax(wanted, -1) * logprobs).sum(-1)
    hard = logprobs.gather(-1, wanted.argmax(-1, keepdim=True))[:, 0]
    # A batch may be of texts that are all shorter than the head is unrolled.
    return -(soft + hard).sum() / max(2 * len(ours), 1)


@torch.inference_mode()
def hits(
    head: EagleHead,
    teacher: Teacher,
    rows: Sequence[tuple[Sample, torch.Tensor]],
    batch_size: int,
    num_steps: int,
) -> list[float]:
    """Per depth: how often the head's likeliest token is the answer's next one.

    Every path fed to the head is the answer's, so these are the chances of one more
    accepted token.
    """
    right, total = [0] * num_steps, [0] * num_steps
    device = head.fc.weight.device
    for start in range(0, len(rows), batch_size):
        batch = [rows[i] for i in range(start, min(start + batch_size, len(rows)))]
        inputs = {name: value.to(device) for name, value in collate(batch).items()}
        ids, (states, _) = inputs["ids"], _split(head, inputs["states"])
        with mixed_precision(device):
            outputs = head.unroll(states, teacher.embed(ids), num_steps)
        for step, output in enumerate(outputs):
            for row, (sample, _) in enumerate(batch):
                first = len(sample.prompt)
                length = first + len(sample.answer)
                begin = max(first - 2 - step, 0)
                end = max(length - 2 - step, begin)
                own = output[row, begin:end]
                best = teacher.tokens[teacher.logits(own).argmax(-1)]
                wanted = ids[row, begin + 2 + step : end + 2 + step]
                right[step] += int((best == wanted).sum())
                total[step] += len(wanted)
    return [r / max(t, 1) for r, t in zip(right, total, strict=True)]


def checkpoint(head: EagleHead) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What config.json and model.safetensors hold; the rest is the target's."""
    weights = {
        name: value.to(torch.bfloat16) for name, value in head.state_dict().items()
    }
    return head.config.to_dict() | {"dtype": "bfloat16"}, weights
