"""The `rllib` command, which Ray itself no longer ships.

Every module of this package without a leading underscore is a sub-command of its name.
It has a docstring, whose first line is the help text, and two functions:
`add_arguments(parser)` and `run(args)`, which returns the exit code.
"""

import argparse
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from rllib_exgrpo.cli._errors import CommandError, paragraph


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments after `rllib`; None takes those of the process.

    Returns:
        The exit code: 0; 1 if a run failed; 2 if it could not start, for a reason that
        is printed as one paragraph; 130 or 143 if Ctrl-C or SIGTERM ended it; 141 if
        what reads the output, such as `head`, wanted no more.
    """
    args = build_parser().parse_args(argv)
    try:
        exit_code: int = args.run(args)
        sys.stdout.flush()
        return exit_code
    except CommandError as error:
        print(paragraph(f"rllib: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("rllib: interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Python flushes once more as it exits, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser with all sub-commands."""
    parser = argparse.ArgumentParser(
        prog="rllib",
        description="Train and evaluate language models with ExGRPO on RLlib.",
        epilog="`rllib COMMAND --help` explains a command. Start with "
        "`rllib example run exgrpo_arithmetic_cpu`.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.name.startswith("_"):
            continue
        module = import_module(f"{__name__}.{module_info.name}")
        text = module.__doc__ or ""
        command = commands.add_parser(
            module_info.name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
