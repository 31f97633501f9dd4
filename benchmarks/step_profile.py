"""Where the milliseconds of a specinfer step go, and tokens/s over plain.

    python benchmarks/step_profile.py [--dtype bfloat16] [--eager] [--prompts 10]
        [--batch 8]

Both engines live in this process and answer MT-bench prompts in turn, one at a time or
so many; the ratio is the median over the turns. "one level" is one SSM pass over a
tree's level plus its head and the choice of the next frontier; the goal is at most 3 ms
on 2 cores. Tokens per step are those of all requests.

"bookkeeping" is what trees cost beyond the models, at most 5% of a step by the goals.
A part is the time inside its functions that no other watched function takes:

- build: the choice of children, frontiers, the tables of trees, what attention is told
  of them, their way from the worker to the scheduler;
- merge: one tree of all sources' nodes, the best of them;
- verify: the walk down the trees and the texts it makes;
- commit: the K/V of accepted paths moves;
- policy: how many nodes a step is worth, and what is learned from it.

What is not: passes and heads of target and SSMs with their inputs, lookups, and vLLM's
sampling of the rows that a walk stands at, with the tests of draws under mss and rrs.
"""

import argparse
import collections
import functools
import json
import operator
import os
import statistics
import time
from pathlib import Path
from typing import Any

from vllm_specinfer.evidence.engines import core_of, forget, stay_in_process

stay_in_process()
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

POOL = Path(__file__).parents[1] / "examples" / "pools" / "smollm2-135m"

BUILD, MERGE, VERIFY, COMMIT, POLICY = "build", "merge", "verify", "commit", "policy"
PARTS = (BUILD, MERGE, VERIFY, COMMIT, POLICY)
DECISIONS = ("grows", "drafts", "worth", "least_score")
DECISIONS += ("observe_step", "observe_draft")

SCHEMA = {
    "type": "object",
    "properties": {
        "summary": {"type": "string"},
        "answer": {"type": "string"},
        "keywords": {"type": "array", "items": {"type": "string"}},
        "confidence": {"type": "integer"},
    },
    "required": ["summary", "answer", "keywords", "confidence"],
}


class Times:
    """What calls take, and what of it they take themselves.

    Attributes:
        calls: Label -> [n] seconds of each call, with all that it calls.
        own: Part of the bookkeeping -> seconds, without watched calls inside.
    """

    def __init__(self) -> None:
        """Nothing is watched yet."""
        self.calls: dict[str, list[float]] = collections.defaultdict(list)
        self.own: collections.Counter[str] = collections.Counter()
        # Of each watched call that runs: seconds of watched calls inside.
        self._inside: list[float] = []

    def watch(
        self, holder: Any, name: str, label: str | None = None, part: str | None = None
    ) -> None:
        """Replace a function by one that notes how long each call takes.

        Args:
            holder: A module, class or object.
            name: Of the function there.
            label: In `calls`, if it is to be listed there.
            part: In `own`; None for what is no bookkeeping.
        """
        function = getattr(holder, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            entered = time.perf_counter()
            self._inside.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                inside = self._inside.pop()
                if label is not None:
                    self.calls[label].append(seconds)
                if part is not None:
                    self.own[part] += seconds - inside
                if self._inside:  # nobody's part is what watching takes
                    self._inside[-1] += time.perf_counter() - entered

        setattr(holder, name, call)


def watch_bookkeeping(times: Times, llm: Any) -> None:
    """Watch what the head of this file says, and what is inside of it but no part.

    Args:
        times: Hears of it.
        llm: An engine with an SSM.
    """
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from vllm_specinfer.scheduling.budget_memory import BudgetMemory
    from vllm_specinfer.tree.table import StepPlan, TreeTable
    from vllm_specinfer.verify.bare_draws import BareDraws
    from vllm_specinfer.verify.sampler import TreeSampler

    scheduler = core_of(llm).scheduler
    worker = core_of(llm).model_executor.driver_worker.worker
    runner = worker.model_runner
    speculator = runner.speculator
    asked, budget = speculator.sources, speculator.budget
    source = asked.ssms[0]
    for holder, name, label, part in (
        (runner, "execute_model", "target forward", None),
        (runner, "sample", "target head and verification", None),
        (TreeSampler, "__call__", None, VERIFY),
        (Sampler, "__call__", None, None),
        (BareDraws, "draw", None, None),
        # The model state's `commit`, which the sampler holds.
        (runner.rejection_sampler, "_commit", "  of it KV commit", COMMIT),
        (worker, "take_draft_token_ids", "drafting", BUILD),
        # Called twice a step, once with nothing to do.
        (speculator, "draft", None, BUILD),
        (speculator, "propose", None, BUILD),
        (source.ssm, "catch_up", "  catch-up pass", None),
        (source.ssm, "run_level", "  level: SSM pass", None),
        (source.ssm, "likeliest", "  level: head", None),
        (source.chooser, "choose", "  level: choice of children", BUILD),
        (asked.steps.grow, "extend", "  level: frontier", BUILD),
        (TreeTable, "plan_step", None, BUILD),
        (StepPlan, "positions", None, BUILD),
        (StepPlan, "ancestor_bits", None, BUILD),
        (scheduler, "update_draft_token_ids", None, BUILD),
        (asked, "propose", None, MERGE),
        (asked.steps, "merge", None, MERGE),
        (asked.steps, "best", None, MERGE),
        (asked.experience, "observe", None, POLICY),
        (BudgetMemory, "note_step", None, POLICY),
        *((budget, name, None, POLICY) for name in DECISIONS),
        *((found, "begin", None, BUILD) for found in asked.ssms),
        # Further SSMs and lookups: their work is drafting.
        *((found.ssm, "catch_up", None, None) for found in asked.ssms[1:]),
        *((found.ssm, "run_level", None, None) for found in asked.ssms[1:]),
        *((found.ssm, "likeliest", None, None) for found in asked.ssms[1:]),
        *((found, "propose", None, None) for found in asked.lookups),
    ):
        times.watch(holder, name, label, part)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--data", default="mtbench", help="mtbench, humaneval, a JSONL")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--json", action="store_true", help="answers must follow a JSON schema"
    )
    parser.add_argument(
        "--params", type=json.loads, default={}, help="more sampling parameters, JSON"
    )
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--target", help="SmolLM2-135M where it is not given")
    parser.add_argument("--ssm", default=str(POOL), help="an SSM or a pool with one")
    parser.add_argument("--scheduler", default="auto")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_specinfer import assets

    target = args.target or str(assets.smollm2())
    common: dict[str, Any] = {
        "model": target,
        "dtype": args.dtype,
        "max_model_len": 2048,
        "max_num_seqs": max(8, args.batch),
        "enforce_eager": args.eager,
        "disable_log_stats": False,
    }
    config = {
        "method": "specinfer",
        "model": args.ssm,
        "num_speculative_tokens": args.nodes,
        "scheduler": args.scheduler,
    }
    plain = LLM(**common)
    tree = LLM(**common, speculative_config=config)
    prompts = assets.prompt_ids(args.data, args.prompts, target)
    params = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        seed=0,
        structured_outputs=StructuredOutputsParams(json=SCHEMA) if args.json else None,
        **args.params,
    )
    for llm in (plain, tree):
        llm.generate({"prompt_token_ids": prompts[0]}, params, use_tqdm=False)
        forget(llm)

    times = Times()
    watch_bookkeeping(times, tree)

    ratios, rates, num_tokens, spent, same = [], [], 0, 0.0, 0
    turns = [prompts[i : i + args.batch] for i in range(0, len(prompts), args.batch)]
    for i, turn in enumerate(turns):
        took, answers, lengths = {}, {}, {}
        for name in ("plain", "tree") if i % 2 else ("tree", "plain"):
            llm = {"plain": plain, "tree": tree}[name]
            start = time.perf_counter()
            outputs = llm.generate(
                [{"prompt_token_ids": ids} for ids in turn], params, use_tqdm=False
            )
            took[name] = time.perf_counter() - start
            answers[name] = [output.outputs[0].token_ids for output in outputs]
            lengths[name] = sum(map(len, answers[name]))
        rates.append((lengths["plain"] / took["plain"], lengths["tree"] / took["tree"]))
        ratios.append(rates[-1][1] / rates[-1][0])
        same += sum(map(operator.eq, answers["plain"], answers["tree"]))
        num_tokens += lengths["tree"]
        spent += took["tree"]
    steps = len(times.calls["target forward"])
    # The V1 runner, plain vLLM's default on a CPU, draws other random numbers.
    compared = "" if args.temperature else f"; {same} texts identical"
    print(
        f"{len(prompts)} prompts, batch {args.batch}, {args.dtype}, temperature "
        f"{args.temperature} {args.params or ''}: plain "
        f"{statistics.median(r[0] for r in rates):.1f} "
        "tokens/s, specinfer "
        f"{statistics.median(r[1] for r in rates):.1f} tokens/s, ratio of each turn: "
        f"median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to "
        f"{max(ratios):.2f}; {num_tokens / steps:.2f} tokens per step{compared}"
    )
    print(f"one step: {spent / steps * 1e3:.1f} ms")
    level = 0.0
    for label, values in times.calls.items():
        median = statistics.median(values) * 1e3
        level += median if "level" in label else 0.0
        print(f"{label:30s} {len(values) / steps:5.2f} a step, {median:7.3f} ms each")
    print(f"one level: {level:.2f} ms")
    parts = ", ".join(f"{part} {times.own[part] / steps * 1e3:.2f}" for part in PARTS)
    own = sum(times.own.values())
    print(
        f"bookkeeping: {own / steps * 1e3:.2f} ms, {100 * own / spent:.1f}% of a step "
        f"({parts})"
    )


if __name__ == "__main__":
    main()
