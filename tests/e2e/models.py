"""Tiny random models for engine tests."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

VOCAB = 96


def tiny_llama(folder: Path, seed: int, scale: float = 6, **overrides: object) -> str:
    """A random Llama whose greedy text is varied and free of near-ties.

    Args:
        folder: Where to write it.
        seed: Of the weights.
        scale: Of the weight matrices; the larger, the surer the model.
        **overrides: LlamaConfig fields.

    Returns:
        The folder.
    """
    config = dict(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**config, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    return str(folder)


def noisy_copy(model: str, folder: Path, noise: float, seed: int = 1) -> str:
    """An SSM that agrees with its target often but not always.

    Args:
        model: The target's folder.
        folder: Where to write the copy.
        noise: Standard deviation of the noise relative to each weight matrix's.
        seed: Of the noise.

    Returns:
        The folder.
    """
    copy = LlamaForCausalLM.from_pretrained(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * noise)
    copy.save_pretrained(folder)
    return str(folder)


GROUPED = {"num_key_value_heads": 2}
# What a family's config needs besides the fields that all of `tiny_model`'s have.
FAMILIES = {
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "gemma": {"head_dim": 32, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "gemma3n_text": {
        "head_dim": 32,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 96,
    },
    "gemma2": {"head_dim": 32, **GROUPED, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 32, **GROUPED, "tie_word_embeddings": True},
    "gpt2": {"tie_word_embeddings": True},
    "gptj": {"rotary_dim": 16},
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": None},
    "mixtral": {**GROUPED, "num_local_experts": 2},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 32},
}


def tiny_model(
    family: str, seed: int, scale: float = 3, **overrides: object
) -> PreTrainedModel:
    """A random model of any family that transformers knows, by default of 96 positions.

    Args:
        family: Its `model_type`.
        seed: Of the weights.
        scale: Of the weight matrices; the larger, the surer the model.
        **overrides: Fields of its config.
    """
    config = {
        **{"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256},
        **{"num_hidden_layers": 2, "num_attention_heads": 4},
        **{"max_position_embeddings": 96, "tie_word_embeddings": False},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        **FAMILIES.get(family, {}),
        **overrides,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model.eval()


@torch.no_grad()
def fit_head(ssm: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give an SSM the output head that comes closest to the target's logits.

    It then foresees what follows from the last token alone, whatever both models are.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (128, 32), generator=generator)
    logits = target(ids).logits.flatten(0, 1)
    states = ssm.base_model(ids).last_hidden_state.flatten(0, 1)
    head = torch.linalg.lstsq(states, logits).solution.T
    ssm.get_output_embeddings().weight.copy_(head)


def lora_adapter(folder: Path, seed: int, rank: int = 4) -> str:
    """A random LoRA adapter of a `tiny_llama`'s queries, values and output head.

    Args:
        folder: Where to write it.
        seed: Of the weights.
        rank: Of the two factors of each change.

    Returns:
        The folder.
    """
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    modules = {"lm_head": VOCAB}
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn."
        modules |= {f"{at}q_proj": 128, f"{at}v_proj": 64}
    for name, width in modules.items():
        for factor, shape in (("A", (rank, 128)), ("B", (width, rank))):
            values = 0.3 * torch.randn(shape, generator=generator)
            weights[f"base_model.model.{name}.lora_{factor}.weight"] = values
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"},
        **{"r": rank, "lora_alpha": rank},
        "target_modules": sorted({name.split(".")[-1] for name in modules}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


# A prompt holds one of these, which become as many as the image takes, between others.
IMAGE, IMAGE_BEGINS, IMAGE_ENDS = VOCAB - 4, VOCAB - 3, VOCAB - 2


def tiny_vision_model(folder: Path, seed: int) -> str:
    """A random PaddleOCR-VL: it reads images, and rotates by M-RoPE.

    Args:
        folder: Where to write it, with its processor.
        seed: Of the weights.

    Returns:
        The folder.
    """
    from transformers import (
        AutoTokenizer,
        PaddleOCRVLConfig,
        PaddleOCRVLForConditionalGeneration,
        PaddleOCRVLProcessor,
    )
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )

    text = {
        **{"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, **GROUPED},
        **{"head_dim": 32, "max_position_embeddings": 512},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0},
            "mrope_section": [4, 6, 6],
        },
    }
    vision = {
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "image_size": 28, "patch_size": 2},
    }
    torch.manual_seed(seed)
    model = PaddleOCRVLForConditionalGeneration(
        PaddleOCRVLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=IMAGE,
            vision_start_token_id=IMAGE_BEGINS,
            vision_end_token_id=IMAGE_ENDS,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and name.startswith(("model.language", "lm_head")):
                parameter.mul_(4)
    model.save_pretrained(folder)
    add_tokenizer(str(folder), extra_special_tokens={"image_token": chr(32 + IMAGE)})
    size = {"shortest_edge": 16, "longest_edge": 1024}
    images = PaddleOCRVLImageProcessorPil(size=size, patch_size=2, merge_size=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    PaddleOCRVLProcessor(images, tokenizer).save_pretrained(folder)
    return str(folder)


def add_tokenizer(*folders: str, eos: int | None = None, **more: object) -> None:
    """Give models a tokenizer whose token i is the character chr(32 + i).

    A chat is what was said, one message behind the other.

    Args:
        folders: The models'.
        eos: The token that ends texts; None where there is none.
        **more: What else the tokenizer is made with.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {chr(32 + i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=chr(31 + VOCAB)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    # As it is, but that guidance wants to know how bytes are written.
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    chat = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for folder in folders:
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            chat_template=chat,
            eos_token=None if eos is None else chr(32 + eos),
            **more,
        ).save_pretrained(folder)


def untrained_head(target: str, folder: Path) -> str:
    """An EAGLE-3 head with the weights that training starts from."""
    from vllm_specinfer.tuning import eagle
    from vllm_specinfer.tuning.head import write_head

    model = LlamaForCausalLM.from_pretrained(target)
    torch.manual_seed(0)
    head = eagle.EagleHead(eagle.head_config(model.config))
    eagle.start_from_last_layer(head, model)
    write_head(folder, head, None)
    return str(folder)


def trained_head(
    target: str,
    folder: Path,
    num_prompts: int = 48,
    length: int = 96,
    epochs: int = 40,
) -> str:
    """An EAGLE-3 head that has learned some of a tiny target's greedy text.

    It learns nothing of a target whose scale is 6: that text is chaos.

    Args:
        target: The target's folder.
        folder: Where to write the head.
        num_prompts: Random prompts whose continuations it learns.
        length: Tokens of each continuation.
        epochs: Passes over them.

    Returns:
        The folder of the head.
    """
    from vllm_specinfer.tuning.data import Sample, TrainingData
    from vllm_specinfer.tuning.head import train, write_head
    from vllm_specinfer.tuning.settings import HeadSettings

    model = LlamaForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (num_prompts, 4), generator=generator)
    with torch.inference_mode():
        for _ in range(length):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    samples = [Sample(row[:4], row[4:]) for row in ids.tolist()]
    data = TrainingData(samples[4:], samples[:4], list(range(VOCAB)))
    settings = HeadSettings(
        target, "", epochs=epochs, batch_size=8, learning_rate=2e-3, draft_vocab=0
    )
    folder.mkdir()
    num_threads = torch.get_num_threads()
    # Tiny matrices gain nothing from a second core.
    torch.set_num_threads(1)
    head, losses, rates = train(folder, model, settings, data)
    torch.set_num_threads(num_threads)
    print(f"loss {losses[0][1]} to {losses[-1][1]}, hit rates {rates}")
    write_head(folder / "head", head, None)
    return str(folder / "head")
