"""The same real prompts, answered by plain vLLM and by vLLM with specinfer.

    python examples/demo.py [--prompts 8] [--max-tokens 128] [--eager]

Prints whether the texts are identical, tokens per second and tokens per step. Both
engines are up at once and take turns, so that a busy machine slows both alike.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

POOL = Path(__file__).parent / "pools" / "smollm2-135m"


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument(
        "--tree", help="an expansion such as 1,1,3,1; default best-first"
    )
    parser.add_argument("--model", help="target; default SmolLM2-135M-Instruct")
    parser.add_argument("--ssm", default=str(POOL))
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    from vllm_specinfer import assets

    target = args.model or str(assets.smollm2())
    prompts = assets.chat_token_ids(target, assets.mtbench()[: args.prompts])

    from vllm import LLM, SamplingParams

    common = dict(
        model=target,
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=8,
        enforce_eager=args.eager,
        disable_log_stats=False,
    )
    config = {"method": "specinfer", "model": args.ssm}
    if args.tree:
        config["tree"] = args.tree
    print("starting plain vLLM ...", flush=True)
    plain = LLM(**common)
    print("starting vLLM with", config, "...", flush=True)
    tree = LLM(**common, speculative_config=config)

    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    for llm in (plain, tree):
        # None of the prompts: a text that has been seen is looked up.
        llm.generate("Why is the sky blue?", params, use_tqdm=False)
    num_steps = decoding_steps(tree)
    rows, texts = [], []
    for i, prompt in enumerate(prompts):
        times, outputs = [], []
        for llm in (plain, tree) if i % 2 == 0 else (tree, plain):
            start = time.perf_counter()
            (output,) = llm.generate(
                {"prompt_token_ids": prompt}, params, use_tqdm=False
            )
            times.append(time.perf_counter() - start)
            outputs.append(output.outputs[0])
        if i % 2:
            times.reverse()
            outputs.reverse()
        before, num_steps = num_steps, decoding_steps(tree)
        same = outputs[0].token_ids == outputs[1].token_ids
        num_tokens = [len(o.token_ids) for o in outputs]
        rates = [n / t for n, t in zip(num_tokens, times, strict=True)]
        texts.append(outputs[1].text)
        # The first token comes with the prompt.
        per_step = (num_tokens[1] - 1) / max(num_steps - before, 1)
        rows.append((same, *rates, per_step))
        print(
            f"prompt {i}: {'identical' if same else 'DIFFERENT'}, {num_tokens[1]} "
            f"tokens, plain {rates[0]:.1f} tokens/s, specinfer {rates[1]:.1f} tokens/s "
            f"({rates[1] / rates[0]:.2f}x), {rows[-1][3]:.2f} tokens per step"
        )
    for llm in (plain, tree):
        llm.llm_engine.engine_core.shutdown()
    print(f"\nfirst answer: {texts[0][:400]!r}\n")
    print(f"{sum(r[0] for r in rows)} of {len(rows)} texts identical")
    speedup = statistics.median(r[2] / r[1] for r in rows)
    print(
        f"median: plain {statistics.median(r[1] for r in rows):.1f} tokens/s, "
        f"specinfer {statistics.median(r[2] for r in rows):.1f} tokens/s "
        f"({speedup:.2f}x), "
        f"{statistics.mean(r[3] for r in rows):.2f} tokens per step"
    )
    if args.dtype == "float32" and not all(r[0] for r in rows):
        raise SystemExit("the texts must be identical in float32; they are not")


def decoding_steps(llm) -> int:
    """With a tree or without, of all requests since the engine started."""
    return sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:spec_decode_num_drafts"
        or metric.name == "vllm:specinfer_plain_request_steps"
        and metric.labels["reason"] != "prefill"
    )


if __name__ == "__main__":
    main()
