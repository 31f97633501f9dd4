"""A new SSM: a Llama whose tied embedding is the target's times a learned projection.

An embedding of its own would have several times the parameters of all its layers, and
overfit.

Dimension legend: V tokens, E the target's hidden size, H hidden size, C = H - 65
channels of content, B continuations, T tokens of the longest.
"""

import math

import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, LlamaModel

from vllm_specinfer.tuning.ssm_copying import (
    HEAD_DIM,
    RESERVED,
    num_kv_heads,
    write_copy_heads,
)

# Standard deviation of the embedding's content, and its constant, in times of the norm
# that the content has.
SCALE, CONSTANT = 0.05, 4.0


def fast_attention() -> str:
    """The implementation of transformers that trains fastest: on a CPU the fused one
    takes several times as long."""
    return "sdpa" if torch.cuda.is_available() else "eager"


def check_hidden(hidden: int, target: str) -> None:
    """Raises ValueError where a target's embedding is too small for a hidden size."""
    size = AutoConfig.from_pretrained(target).get_text_config().hidden_size
    if hidden - RESERVED > size:
        raise ValueError(
            f"hidden must be at most {size + RESERVED}, {RESERVED} more than the "
            f"target's; got {hidden}"
        )


class NewSSM(nn.Module):
    """The layers and the projection, which learn, and the target's embedding."""

    def __init__(
        self, embedding: torch.Tensor, target: str, hidden: int, layers: int
    ) -> None:
        """Begin with the directions that tell tokens apart, and with copy heads.

        Args:
            embedding: [V, E] float32, the target's.
            target: Folder or hub id, for what configs of both share.
            hidden: H, as `check_hidden` has it.
            layers: At least two.
        """
        super().__init__()
        theirs = AutoConfig.from_pretrained(target).get_text_config()
        rope = getattr(theirs, "rope_parameters", None) or {}
        num_kv = num_kv_heads(hidden)
        self.config = LlamaConfig(
            vocab_size=len(embedding),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=2 * num_kv,
            num_key_value_heads=num_kv,
            head_dim=HEAD_DIM,
            max_position_embeddings=theirs.max_position_embeddings,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": rope.get("rope_theta", 10000.0),
            },
            tie_word_embeddings=True,
            # Half of the usual: what is random disturbs the copying.
            initializer_range=0.01,
            attn_implementation=fast_attention(),
            bos_token_id=theirs.bos_token_id,
            eos_token_id=theirs.eos_token_id,
            pad_token_id=theirs.pad_token_id,
        )
        self.layers = LlamaModel(self.config)
        self.layers.embed_tokens = None
        centred = embedding - embedding.mean(0)
        directions = torch.linalg.eigh(centred.T @ centred)[1].flip(1)
        num_content = hidden - RESERVED
        content = directions[:, :num_content]
        scale = SCALE / (embedding @ content).std()
        constant = torch.full(
            (len(embedding), 1), CONSTANT * SCALE * math.sqrt(num_content)
        )
        # Not in checkpoints: it never changes.
        self.register_buffer(
            "embedding", torch.cat([embedding * scale, constant], 1), persistent=False
        )
        projection = torch.zeros(embedding.shape[1] + 1, hidden)
        projection[:-1, :num_content] = content
        projection[-1, -1] = 1
        self.projection = nn.Parameter(projection)
        write_copy_heads(self.layers, self.embedding @ projection)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the SSM's embedding, [*tokens.shape, H]."""
        return self.embedding[tokens] @ self.projection

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Last hidden states [B, T, H] of token ids [B, T]."""
        return self.layers(inputs_embeds=self.rows(ids)).last_hidden_state

    def finished(self) -> LlamaForCausalLM:
        """The same as an ordinary model, with the embedding written out."""
        model = LlamaForCausalLM(self.config)
        model.model.load_state_dict(self.layers.state_dict(), strict=False)
        with torch.no_grad():
            rows = self.rows(torch.arange(len(self.embedding), device=self.device))
            model.model.embed_tokens.weight.copy_(rows)
        return model

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.projection.device
