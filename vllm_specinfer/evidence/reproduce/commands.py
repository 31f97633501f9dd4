"""The command lines of `reproduce`."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm_specinfer.evidence.arguments import at_least, model, out_folder
from vllm_specinfer.evidence.commands import (
    PROMPTS_HELP,
    answer_options,
    answers_to,
    costs_of,
    engine_options,
    fit_options,
    target_of,
    temperature_option,
    temperatures_option,
)
from vllm_specinfer.evidence.tables import Rows, report
from vllm_specinfer.options import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    METHOD,
    VERIFICATIONS,
)

# There in a checkout.
POOL = Path(__file__).parents[3] / "examples" / "pools" / "smollm2-135m"
SHIPPED_SSM = POOL / "ssm0"
NODES_HELP = "most nodes of a tree (8)"


def add(commands: "argparse._SubParsersAction") -> None:
    """Add the command, with one below it for each table."""
    parser = commands.add_parser(
        "reproduce",
        help="the tables of the SpecInfer paper in kind",
        description="The tables of the SpecInfer paper (arXiv 2305.09781) in kind, as "
        "CSV, Markdown and a picture. table3 answers all prompts twelve times, which "
        "takes longest; --max-prompts shortens it.",
    )
    tables = parser.add_subparsers(dest="table", required=True)

    table = _add_table(tables, "table1", "hit rate of the SSM's k best tokens")
    _add_answers(table, 20, [0.0, 1.0])
    _add_ssm(table)
    table.add_argument(
        "--most", type=at_least(int, 1), default=5, help="the largest k (5)"
    )
    table.set_defaults(run=_table1)

    table = _add_table(tables, "table2", "tokens per step by the width of the tree")
    _add_answers(table, 20, [0.0, 1.0])
    _add_ssm(table)
    table.add_argument(
        "--widths",
        type=at_least(int, 1),
        nargs="+",
        default=[1, 2, 3, 4, 5],
        help="k of 1,1,k,1.. (1 2 3 4 5)",
    )
    table.set_defaults(run=_table2)

    table = _add_table(tables, "table3", "tokens per step by verification rule")
    _add_answers(table, 0, [0.3, 0.7, 1.0])
    _add_ssm(table)
    rules = [rule for rule in VERIFICATIONS if rule != "auto"]
    table.add_argument(
        "--rules", nargs="+", choices=rules, default=rules, help="(all of them)"
    )
    table.add_argument("--nodes", type=at_least(int, 1), default=8, help=NODES_HELP)
    table.set_defaults(run=_table3)

    table = _add_table(tables, "ssms", "tokens per step by the number of SSMs")
    _add_answers(table, 20, [0.0, 0.7])
    table.add_argument(
        "--pools",
        type=model,
        nargs="+",
        help="folders (the shipped pool)",
        **_shipped(POOL, lambda pool: [pool]),
    )
    table.add_argument("--nodes", type=at_least(int, 1), default=8, help=NODES_HELP)
    table.set_defaults(run=_ssms)

    table = _add_table(tables, "scheduler", "schedulers beside an oracle, from traces")
    engine_options(table)
    answer_options(table, 30)
    table.add_argument(
        "--prompts",
        nargs="+",
        default=["mtbench", "humaneval"],
        help=f"{PROMPTS_HELP} (mtbench humaneval)",
    )
    temperature_option(table)
    _add_ssm(table)
    table.add_argument("--tree", default="4,3,2,1", help="recorded (4,3,2,1)")
    fit_options(table)
    table.set_defaults(run=_scheduler)

    table = _add_table(tables, "tp", "two ranks of tensor parallelism against plain")
    _add_regime(table)
    table.set_defaults(run=_tp)

    table = _add_table(tables, "offload", "weights in the host's memory, on CUDA")
    _add_regime(table)
    table.add_argument(
        "--gib",
        type=at_least(float, 0),
        default=0.15,
        help="of the target on the host (0.15)",
    )
    table.set_defaults(run=_offload)

    table = _add_table(tables, "treeattn", "attention of trees against that of paths")
    _add_sizes(table, [1, 8], [8, 16, 32, 64, 128])
    table.add_argument(
        "--context", type=at_least(int, 0), default=512, help="positions before (512)"
    )
    table.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of K, V and queries (float32)",
    )
    table.add_argument(
        "--seconds", type=at_least(float, 0), default=2.0, help="for each size (2)"
    )
    table.set_defaults(run=_treeattn)

    table = _add_table(tables, "memory", "memory beyond weights and K/V by nodes")
    engine_options(table)
    _add_ssm(table)
    _add_sizes(table, [1, 8], [32, 64, 128])
    table.set_defaults(run=_memory)


def _add_table(
    tables: "argparse._SubParsersAction", name: str, text: str
) -> argparse.ArgumentParser:
    table = tables.add_parser(name, help=text, description=text)
    table.add_argument("--out", type=out_folder, required=True, help="the folder")
    return table


def _add_answers(
    parser: argparse.ArgumentParser, max_prompts: int, temperatures: list[float]
) -> None:
    engine_options(parser)
    answer_options(parser, max_prompts)
    parser.add_argument(
        "--prompts", default="mtbench", help=f"{PROMPTS_HELP} (mtbench)"
    )
    temperatures_option(parser, temperatures)


def _add_regime(parser: argparse.ArgumentParser) -> None:
    _add_answers(parser, 20, [0.0])
    _add_ssm(parser)
    parser.add_argument(
        "--batches",
        type=at_least(int, 1),
        nargs="+",
        default=[1, 4],
        help="requests in flight (1 4)",
    )
    parser.add_argument(
        "--starts", type=at_least(int, 1), default=2, help="of each engine, in turn (2)"
    )


def _add_ssm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ssm",
        type=model,
        help="SSM, pool or lookup (the shipped SSM)",
        **_shipped(SHIPPED_SSM, str),
    )


def _shipped(folder: Path, default: Callable[[str], Any]) -> dict[str, Any]:
    """What an option is by default; an installed package must be told."""
    return {"default": default(str(folder))} if folder.exists() else {"required": True}


def _add_sizes(
    parser: argparse.ArgumentParser, batches: list[int], nodes: list[int]
) -> None:
    for name, values, what in (
        ("--batches", batches, "requests at once"),
        ("--nodes", nodes, "of every tree"),
    ):
        shown = " ".join(map(str, values))
        text = f"{what} ({shown})"
        parser.add_argument(
            name, type=at_least(int, 1), nargs="+", default=values, help=text
        )


def _answers(args: argparse.Namespace) -> Any:
    return answers_to(args, args.prompts, args.temperatures)


def _show(args: argparse.Namespace, tables: Iterable[Rows], **axes: str) -> int:
    """Write the rows so far, again and again: what is measured is not lost."""
    for rows in tables:
        text = report(args.out, args.table, rows, **axes)
    print(text)
    print(f"{args.table}.csv, .md and .png in {args.out}")
    return 0


def _table1(args: argparse.Namespace) -> int:
    answers = _answers(args)
    from vllm_specinfer.evidence.reproduce.table1 import table1

    rows = table1(answers, args.ssm, args.most, args.out)
    return _show(args, [rows], x="k", y="hit rate", line="temperature")


def _table2(args: argparse.Namespace) -> int:
    answers = _answers(args)
    from vllm_specinfer.evidence.reproduce.steps import table2

    rows = table2(answers, args.ssm, args.widths)
    return _show(args, rows, x="width", y="tokens per step", line="temperature")


def _table3(args: argparse.Namespace) -> int:
    answers = _answers(args)
    from vllm_specinfer.evidence.reproduce.steps import table3

    rows = table3(answers, args.ssm, args.rules, args.nodes)
    return _show(args, rows, x="temperature", y="tokens per step", line="rule")


def _ssms(args: argparse.Namespace) -> int:
    answers = _answers(args)
    from vllm_specinfer.evidence.reproduce.steps import ssms

    rows = ssms(answers, args.pools, args.nodes)
    return _show(args, rows, x="SSMs", y="tokens per step", line="temperature")


def _scheduler(args: argparse.Namespace) -> int:
    sets = [answers_to(args, name, [args.temperature]) for name in args.prompts]
    from vllm_specinfer.evidence.reproduce.scheduler import USUAL_COSTS, scheduler

    costs = costs_of(args) or USUAL_COSTS
    nodes = args.nodes or DEFAULT_NUM_SPECULATIVE_TOKENS
    rows = scheduler(sets, args.ssm, args.tree, args.size, costs, nodes, args.out)
    return _show(args, [rows], x="scheduler", y="tokens/s over plain", line="prompts")


def _tp(args: argparse.Namespace) -> int:
    from vllm_specinfer.evidence.reproduce.heads import smollm2_for
    from vllm_specinfer.evidence.reproduce.regimes import RANKS, tensor_parallel

    engine = tensor_parallel()
    args.target = args.target or str(smollm2_for(RANKS))
    return _regime(args, engine)


def _offload(args: argparse.Namespace) -> int:
    from vllm_specinfer.evidence.reproduce.regimes import offloaded

    return _regime(args, offloaded(args.gib))


def _regime(args: argparse.Namespace, engine: dict[str, Any]) -> int:
    target = target_of(args)
    from vllm_specinfer.evidence.bench import BenchSettings
    from vllm_specinfer.evidence.reproduce.regimes import compare

    settings = BenchSettings(
        target=target,
        configs={METHOD: {"method": METHOD, "model": args.ssm}},
        prompts=[args.prompts],
        temperatures=args.temperatures,
        batches=args.batches,
        max_prompts=args.max_prompts,
        max_tokens=args.max_tokens,
        engine={**engine, **args.engine},
        starts=args.starts,
    )
    rows = compare(args.out, settings)
    return _show(args, rows, x="batch", y="ratio", line="temperature")


def _treeattn(args: argparse.Namespace) -> int:
    import torch

    from vllm_specinfer.evidence.reproduce.treeattn import treeattn

    dtype = getattr(torch, args.dtype)
    rows = treeattn(args.batches, args.nodes, args.context, dtype, args.seconds)
    return _show(args, rows, x="nodes", y="time, paths over tree", line="batch")


def _memory(args: argparse.Namespace) -> int:
    target = target_of(args)
    from vllm_specinfer.evidence.reproduce.memory import memory

    rows = memory(target, args.ssm, args.nodes, args.batches, args.engine)
    return _show(args, rows, x="nodes", y="MiB more than plain", line="batch")
