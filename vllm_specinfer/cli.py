"""The command ``vllm-specinfer``."""

import argparse
import dataclasses
import sys
from pathlib import Path

from vllm_specinfer.tuning.settings import Settings


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit code is 0 where it worked."""
    parser = argparse.ArgumentParser(prog="vllm-specinfer")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_tune(commands)
    _add_check(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (OSError, ValueError) as error:
        print(f"vllm-specinfer: {error}", file=sys.stderr)
        return 1


def _add_tune(commands: "argparse._SubParsersAction") -> None:
    parser = commands.add_parser(
        "tune",
        help="boost-tune a pool of SSMs for a target",
        description="Boost-tune a pool of SSMs on a target's own continuations. "
        "The same command goes on where a killed one stopped.",
    )
    parser.add_argument("--out", type=Path, required=True, help="the pool folder")
    helps = {
        "target": "folder or hub id",
        "prompts": "JSONL with prompt or messages, or a text file, one a line",
        "num_ssms": "rounds, an SSM each",
        "base": "SSM to start every round from; default: a new one",
        "keep_base": "the base is the first SSM of the pool as it is",
        "layers": "of a new SSM",
        "hidden": "size of a new SSM",
        "draft_vocab": "commonest tokens that the head keeps; 0 for all",
        "max_prompts": "use no more; 0 for all",
        "max_tokens": "of each continuation",
        "compare_length": "tokens of a window, marked when an SSM writes all of it",
        "epochs": "passes over the unmarked windows",
        "learning_rate": "of AdamW",
        "batch_size": "continuations per step",
        "validation": "part of the prompts held out for the curves",
        "seed": "of order and new weights",
    }
    for field in dataclasses.fields(Settings):
        required = field.default is dataclasses.MISSING
        flag = f"--{field.name.replace('_', '-')}"
        if field.default is False:
            parser.add_argument(flag, action="store_true", help=helps[field.name])
            continue
        kind = str if required or field.default is None else type(field.default)
        shown = "" if required or field.default is None else f" ({field.default})"
        parser.add_argument(
            flag,
            type=kind,
            required=required,
            default=None if required else field.default,
            help=helps[field.name] + shown,
        )
    parser.set_defaults(run=_tune)


def _tune(args: argparse.Namespace) -> int:
    from vllm_specinfer.tuning.pool import tune

    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(args, name) for name in names})
    tune(args.out, settings, sys.argv)
    print(
        f"pool in {args.out}; use it as --speculative-config "
        f'\'{{"method": "specinfer", "model": "{args.out}"}}\''
    )
    return 0


def _add_check(commands: "argparse._SubParsersAction") -> None:
    parser = commands.add_parser(
        "check",
        help="say what is installed and whether it works",
        description="Say what is installed and whether it works; exit code 0 if so.",
    )
    parser.add_argument(
        "--no-run", action="store_true", help="do not start an engine to try it"
    )
    parser.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    from vllm_specinfer.checkup import check

    return check(runs=not args.no_run)


if __name__ == "__main__":
    sys.exit(main())
