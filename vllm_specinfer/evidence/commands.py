"""The command lines of `record` and `simulate`."""

import argparse
import json
import sys
from pathlib import Path

from vllm_specinfer.options import DEFAULT_MIN_PROBABILITY

PROMPTS_HELP = "JSONL with prompt or messages, a text file, mtbench or humaneval"


def add(commands: "argparse._SubParsersAction") -> None:
    """Add the commands."""
    _add_record(commands)
    _add_simulate(commands)


def _engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="folder or hub id")
    parser.add_argument(
        "--max-prompts", type=int, default=0, help="spread over the file; 0 for all"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer")
    parser.add_argument(
        "--engine",
        type=json.loads,
        default={},
        metavar="JSON",
        help='arguments of vllm.LLM, as \'{"dtype": "float32"}\'',
    )


def _add_record(commands: "argparse._SubParsersAction") -> None:
    parser = commands.add_parser(
        "record",
        help="record a trace of verified trees, for simulate",
        description="Answer prompts with a wide tree in every step, and write down "
        "which of its nodes the target's own text goes through.",
    )
    _engine_options(parser)
    parser.add_argument("--prompts", required=True, help=PROMPTS_HELP)
    parser.add_argument("--ssm", required=True, help="SSM, pool, or lookup")
    parser.add_argument("--out", type=Path, required=True, help="the trace, JSONL")
    parser.add_argument("--tree", default="5,3,2,1,1", help="the expansion (5,3,2,1,1)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.set_defaults(run=_record)


def _record(args: argparse.Namespace) -> int:
    from vllm_specinfer.evidence.engines import stay_in_process

    stay_in_process()
    from vllm_specinfer.evidence.record import record

    record(
        args.out,
        target=args.target,
        ssm=args.ssm,
        source=args.prompts,
        tree=args.tree,
        max_prompts=args.max_prompts,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        engine=args.engine,
        command=sys.argv,
    )
    print(f"trace in {args.out}; now vllm-specinfer simulate {args.out}")
    return 0


def _add_simulate(commands: "argparse._SubParsersAction") -> None:
    parser = commands.add_parser(
        "simulate",
        help="tokens per step of other trees, from a trace",
        description="Tokens per step of tree shapes on a recorded trace, without a "
        "model. Approximate for all but the recorded tree: its steps start where its "
        "own paths ended.",
    )
    parser.add_argument("trace", type=Path, help="what record has written")
    parser.add_argument("--trees", nargs="*", help="expansions, as 2,2,1")
    parser.add_argument(
        "--nodes", type=int, nargs="*", help="best-first trees of so many nodes"
    )
    parser.add_argument(
        "--min-probability",
        type=float,
        default=DEFAULT_MIN_PROBABILITY,
        help=f"of the best-first trees ({DEFAULT_MIN_PROBABILITY})",
    )
    parser.add_argument(
        "--costs", type=Path, help="CSV: rows of a target step, seconds it takes"
    )
    parser.add_argument(
        "--level-seconds", type=float, default=0.0, help="of one pass of drafting"
    )
    parser.add_argument("--batch", type=int, default=1, help="requests per step")
    parser.add_argument("--out", type=Path, help="folder for the table and a picture")
    parser.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> int:
    from vllm_specinfer.evidence.simulate import read_costs, report, simulate_all
    from vllm_specinfer.evidence.trace import read_trace

    trace = read_trace(args.trace)
    costs = args.costs and read_costs(args.costs, args.level_seconds, args.batch)
    simulated = simulate_all(trace, args.trees, args.nodes, args.min_probability)
    print(report(trace, simulated, costs, args.out))
    return 0
