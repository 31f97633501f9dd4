"""specinfer against plain vLLM at every load, and with an SSM that is wrong.

    python benchmarks/load.py [--ssms good wrong] [--contexts 0 2048]
        [--data mtbench humaneval] [--batches 1 2 4 8 16 32] [--temperatures 0 1]
        [--out FOLDER] [options of `bench`]

`vllm-specinfer bench` with answers of half to one and a half times `--max-tokens`, so
that requests come and go one by one. Prompts are those of all data, mixed; all begin
with the same tokens, so many with the prompt (0: none), as behind a long system prompt.
"""

import argparse
import json
import os
import random
import shutil
import sys
from pathlib import Path

from vllm_specinfer import assets, cli

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

POOL = Path(__file__).parents[1] / "examples" / "pools" / "smollm2-135m"


def wrong_ssm(pool: Path, folder: Path) -> Path:
    """A pool's first SSM with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(pool / "ssm0", folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> int:
    """Write the prompts and the wrong SSM, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ssms", nargs="+", default=["good"], choices=("good", "wrong")
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[0])
    parser.add_argument("--data", nargs="+", default=["mtbench", "humaneval"])
    parser.add_argument("--out", type=Path, default=Path("runs/load"))
    parser.add_argument("--target", help="SmolLM2-135M where it is not given")
    parser.add_argument("--pool", type=Path, default=POOL, help="with the SSM")
    args, rest = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.target or str(assets.smollm2())
    files = []
    prompts = sum((assets.prompt_ids(data, model=target) for data in args.data), [])
    # Engines whose requests part read prompts of the next turn, too.
    random.Random(0).shuffle(prompts)
    data = ", ".join(Path(data).stem for data in args.data)
    for length in args.contexts:
        name = data + (f" after {length} tokens" if length else "")
        files.append(str(args.out / f"{name}.jsonl"))
        with open(files[-1], "w") as file:
            for ids in assets.with_context(prompts, length):
                file.write(json.dumps({"prompt": ids}) + "\n")
    configs = []
    for name in args.ssms:
        model = args.pool if name == "good" else wrong_ssm(args.pool, args.out / name)
        configs += ["--config", f"{name}={json.dumps({'model': str(model)})}"]
    engine = ["--engine", '{"dtype": "float32"}']
    common = ["bench", "--ignore-eos", "--range-ratio", "0.5", "--target", target]
    common += ["--out", str(args.out), "--prompts", *files]
    return cli.main([*common, *configs, *engine, *rest])


if __name__ == "__main__":
    sys.exit(main())
