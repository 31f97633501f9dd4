"""New weights for a running engine."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from tests import processes
from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama
from vllm_specinfer.evidence.engines import runner_of
from vllm_specinfer.tuning import eagle
from vllm_specinfer.tuning.head import write_head

PROMPT, LENGTH = [1, 2, 3], 24
# Logits of rows and states of bfloat16 are bfloat16, too.
NEAR = {"atol": 0.05, "rtol": 0}
# Some that need more bytes than those before, and some that do not.
TYPES = torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16


def generate(job: tuple[dict, list[str]]) -> list[list[int]]:
    """Greedy texts of an engine, then with the weights of each of these folders.

    Args:
        job: Its arguments, and the folders.
    """
    from vllm import LLM, SamplingParams

    processes.hasten_starts()
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    arguments, folders = job
    llm, texts = LLM(**{"enforce_eager": True, **arguments}), []
    for folder in [None, *folders]:
        if folder is not None:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        texts.append(output.outputs[0].token_ids)
    return texts


def published(folder: Path, seed: int, dtype: torch.dtype) -> str:
    """A model whose head is its embedding, in a type of 16 bits or in float32."""
    made = tiny_llama(folder, seed, num_hidden_layers=1, tie_word_embeddings=True)
    LlamaForCausalLM.from_pretrained(made).to(dtype).save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("types", "eager"), [(TYPES, True), (TYPES, False), (TYPES[2:], True)]
)
def test_texts_are_those_of_the_new_weights(tmp_path, types, eager):
    models = [
        published(tmp_path / f"model{seed}", seed, dtype)
        for seed, dtype in enumerate(types)
    ]
    ssm = noisy_copy(models[0], tmp_path / "ssm", noise=0.05)
    plain = [processes.call(generate, (engine.tiny(m), []))[0] for m in models]
    spec = {"method": "specinfer", "model": ssm, "scheduler": "static"}
    llm = {**engine.tiny(models[0]), "speculative_config": spec, "enforce_eager": eager}
    texts = processes.call(generate, (llm, models[1:]))
    assert texts == plain and len(set(map(tuple, texts))) == len(models)


def random_head(target: str, folder: Path, tokens: list[int] | None) -> str:
    """An EAGLE-3 head that has learned nothing, and drafts these tokens or any."""
    config = eagle.head_config(AutoConfig.from_pretrained(target))
    write_head(folder, eagle.EagleHead(config), tokens)
    return str(folder)


def norm_of_ssm(arguments: dict) -> list[float]:
    """The weights of the last norm of an engine's SSM."""
    from vllm import LLM

    processes.hasten_starts()
    llm = LLM(**arguments, enforce_eager=True)
    (source,) = runner_of(llm).speculator.sources.ssms
    return source.ssm.model.model.norm.weight.tolist()


@pytest.mark.parametrize("kind", ["ssm", "eagle3"])
def test_weights_that_are_the_targets_to_come_are_not_an_ssms(tmp_path, kind):
    target, ssm = (tiny_llama(tmp_path / f"model{seed}", seed) for seed in (0, 1))
    if kind == "eagle3":
        ssm = random_head(target, tmp_path / "head", None)
    spec = {"method": "specinfer", "model": ssm}
    llm = {**engine.tiny(target), "speculative_config": spec, "load_format": "dummy"}
    assert set(processes.call(norm_of_ssm, llm)) == {1.0}


def drafts_of(job: tuple[dict, str, list[list[float]]]) -> list[list[float]]:
    """Log-probabilities that an engine's head drafts by after new weights.

    Args:
        job: Its arguments, the folder of the weights, and hidden states of the head.
    """
    from vllm import LLM

    processes.hasten_starts()
    arguments, folder, hidden = job
    llm = LLM(**arguments, enforce_eager=True)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    (source,) = runner_of(llm).speculator.sources.ssms
    return source.ssm.head.likeliest(torch.tensor(hidden), 3)[0].tolist()


def test_a_head_drafts_by_the_targets_new_weights(tmp_path):
    """Where it multiplies some rows of what is the target's output head."""
    models = [tiny_llama(tmp_path / f"model{seed}", seed) for seed in (0, 1)]
    tokens = list(range(0, 96, 5))
    made = random_head(models[0], tmp_path / "head", tokens)
    spec = {"method": "specinfer", "model": made}
    llm = {**engine.tiny(models[0]), "speculative_config": spec}
    head = LlamaForCausalLM.from_pretrained(models[1]).lm_head.weight[tokens]
    hidden = torch.randn(4, head.shape[1])
    found = processes.call(drafts_of, (llm, models[1], hidden.tolist()))
    wanted = (hidden.bfloat16().float() @ head.bfloat16().float().T).log_softmax(-1)
    torch.testing.assert_close(torch.tensor(found), wanted.topk(3).values, **NEAR)
