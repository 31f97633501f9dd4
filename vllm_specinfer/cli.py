"""The command ``vllm-specinfer``."""

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from vllm_specinfer import __version__
from vllm_specinfer.evidence import commands as evidence
from vllm_specinfer.evidence.arguments import json_object, out_folder, target
from vllm_specinfer.evidence.reproduce import commands as reproduce
from vllm_specinfer.sentences import sentence
from vllm_specinfer.tuning.settings import HeadSettings, PoolSettings

SETTINGS = {"ssm": PoolSettings, "eagle3": HeadSettings}


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit code is 0 where it worked."""
    parser = argparse.ArgumentParser(prog="vllm-specinfer")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_tune(commands)
    _add_check(commands)
    evidence.add(commands)
    reproduce.add(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ImportError, OSError, ValueError) as error:
        print("vllm-specinfer:", sentence(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vllm-specinfer: interrupted", file=sys.stderr)
        return 130


def _add_tune(commands: "argparse._SubParsersAction") -> None:
    parser = commands.add_parser(
        "tune",
        help="train a pool of SSMs or an EAGLE-3 head for a target",
        description="Boost-tune a pool of SSMs, or train an EAGLE-3 head, on a "
        "target's own continuations. The same command goes on where a killed one "
        "stopped.",
    )
    parser.add_argument("--out", type=out_folder, required=True, help="the folder")
    parser.add_argument(
        "--type", choices=SETTINGS, default="ssm", help="what to train (ssm)"
    )
    helps = {
        "target": "folder or hub id",
        "prompts": "JSONL with prompt or messages, or a text file, one a line",
        "draft_vocab": "commonest tokens that are drafted; 0 for all",
        "max_prompts": "use no more; 0 for all",
        "max_tokens": "of each continuation",
        "epochs": "passes over the continuations",
        "learning_rate": "at its highest; ssm: 0 for 2e-3, with a base 3e-4",
        "batch_size": "continuations per step",
        "validation": "part of the prompts, the first, held out for the curves",
        "seed": "of order and new weights",
        "engine": "arguments of the vllm.LLM that continues the prompts, as JSON",
        "num_ssms": "rounds, an SSM each",
        "base": "SSM to start every round from; default: a new one",
        "keep_base": "the base is the first SSM of the pool as it is",
        "layers": "of a new SSM",
        "hidden": "size of a new SSM",
        "compare_length": "tokens of a window, marked when an SSM writes all of it",
        "unroll": "depths to train",
        "compile": "compile first: minutes at the start, twice the speed",
    }
    kinds: dict[str, dict[str, dataclasses.Field]] = {}
    for kind, settings in SETTINGS.items():
        for field in dataclasses.fields(settings):
            kinds.setdefault(field.name, {})[kind] = field
    for name, fields in kinds.items():
        kind, field = next(iter(fields.items()))
        made = field.default_factory is dict
        required = field.default is dataclasses.MISSING and not made
        text = helps[name] if len(fields) > 1 else f"{kind}: {helps[name]}"
        if field.default is False:
            options: dict[str, Any] = {"action": "store_true"}
        elif made:
            options = {"type": json_object, "metavar": "JSON"}
        elif name in ("target", "base"):
            options = {"type": target}
        else:
            plain = required or field.default is None
            options = {"type": str if plain else type(field.default)}
            defaults = {own.default for own in fields.values()}
            shown = str(field.default)
            if len(defaults) > 1:
                shown = ", ".join(f"{k} {own.default}" for k, own in fields.items())
            text += "" if plain else f" ({shown})"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            required=required,
            default=argparse.SUPPRESS,
            help=text,
            **options,
        )
    parser.set_defaults(run=_tune)


def _tune(args: argparse.Namespace) -> int:
    settings = SETTINGS[args.type]
    given = vars(args).keys() - {"out", "type", "run", "command"}
    foreign = given - {field.name for field in dataclasses.fields(settings)}
    if foreign:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(foreign))
        raise ValueError(f"--type {args.type} must go without {names}")
    if "base" in given and (shape := given & {"layers", "hidden"}):
        names = ", ".join(f"--{name}" for name in sorted(shape))
        raise ValueError(f"--base must go without {names}: a new SSM has them")
    wanted = settings(**{name: getattr(args, name) for name in given})
    import torch

    from vllm_specinfer.evidence import engines

    if torch.cuda.is_available():
        # Its memory must be free for training. A fork could not use CUDA, which torch
        # has just asked for GPUs.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        engines.stay_quiet()
    else:
        # A process of its own would wait busily, on one of maybe two cores.
        engines.stay_in_process()
    engines.check_arguments(wanted.engine)
    if args.type == "eagle3":
        from vllm_specinfer.tuning.head import tune_head

        rates = tune_head(args.out, wanted)
        shown = ", ".join(f"{rate:.3f}" for rate in rates)
        print(f"validation tokens hit first, by depth: {shown}")
    else:
        from vllm_specinfer.tuning.pool import tune

        tune(args.out, wanted)
    print(
        f"{args.type} in {args.out}; use it as --speculative-config "
        f'\'{{"method": "specinfer", "model": "{args.out}"}}\''
    )
    return 0


def _add_check(commands: "argparse._SubParsersAction") -> None:
    parser = commands.add_parser(
        "check",
        help="say what is installed and whether it works",
        description="Say what is installed and whether it works; exit code 0 if so.",
    )
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument(
        "--no-run", action="store_true", help="do not start an engine to try it"
    )
    alone.add_argument(
        "--vllm-source",
        type=Path,
        help="only compare the vLLM in this folder or wheel, read and not run, with "
        "what is relied on",
    )
    parser.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    from vllm_specinfer.checkup import check, check_source

    if args.vllm_source is not None:
        return check_source(args.vllm_source)
    return check(runs=not args.no_run)


if __name__ == "__main__":
    sys.exit(main())
