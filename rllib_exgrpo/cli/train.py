"""Train a model.

From a Python file with a module-level `config` (an ExGRPOConfig) and, optionally,
`stop` (a dict); from a YAML file (`NAME: {run: ExGRPO, env: ..., stop: ..., config:
...}`); from flags alone; or on from where a run ended.
"""

import argparse

from rllib_exgrpo.cli._errors import CommandError
from rllib_exgrpo.cli._options import (
    add_run_arguments,
    resume_with_options,
    run_with_options,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rllib train`."""
    parser.usage = (
        "rllib train file PATH [options]\n"
        "       rllib train --algo ExGRPO --env MODULE:CLASS --stop JSON [options]\n"
        "       rllib train --resume RUN [options]"
    )
    parser.add_argument("source", nargs="*", metavar="file PATH", help="a .py or .yaml")
    parser.add_argument("--algo", help="the algorithm, without a file: ExGRPO")
    parser.add_argument(
        "--env",
        metavar="MODULE:CLASS",
        help="the environment, without a file; or a registered name",
    )
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs `rllib train`."""
    from rllib_exgrpo.cli._experiment import Experiment

    if args.resume and not args.source and args.algo is None:
        return resume_with_options(args)
    match args.source:
        case ["file", path] if args.algo is None and args.env is None:
            experiment = Experiment.from_file(path)
        case [] if args.algo is not None:
            experiment = Experiment.from_names(
                f"{args.algo}_{(args.env or 'run').replace(':', '.').split('.')[-1]}",
                algorithm=args.algo,
                env=args.env,
                config={},
                stop={},
            )
        case _:
            raise CommandError(
                "give either `rllib train file PATH`, or `rllib train --algo ExGRPO "
                "--env MODULE:CLASS`; `rllib train --help` explains both."
            )
    return run_with_options(experiment, args)
