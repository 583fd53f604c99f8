"""Options that `rllib train` and `rllib example run` share."""

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # not imported yet, so that --help need not wait for RLlib
    from rllib_exgrpo.cli._experiment import Experiment


def json_object(text: str) -> dict[str, Any]:
    """Parses an option's JSON object.

    Raises:
        argparse.ArgumentTypeError: if it is not one, with the place of the fault.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"""{text!r} is not a JSON object: write '{{"name": value}}'."""
        )
    return value


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a training run."""
    parser.add_argument(
        "--stop",
        type=json_object,
        default={},
        metavar="JSON",
        help="end the run once a metric is at least a value, for example "
        """'{"training_iteration": 100}'; added to the file's own""",
    )
    parser.add_argument(
        "--config",
        type=json_object,
        default={},
        metavar="JSON",
        help="""settings of ExGRPOConfig, for example '{"lr": 1e-5}'; they win""",
    )
    parser.add_argument("--name", help="name of the run and its folder of results")
    parser.add_argument(
        "--storage-path",
        default="results",
        metavar="FOLDER",
        help="where the run's folder goes (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the run")
    parser.add_argument(
        "--checkpoint-freq",
        type=int,
        default=0,
        metavar="N",
        help="save a checkpoint every N steps; one is always saved at the end",
    )


def run_with_options(experiment: "Experiment", args: argparse.Namespace) -> int:
    """Runs an experiment with the options of the command line.

    Returns:
        The exit code.
    """
    from rllib_exgrpo.cli._ray import quieten
    from rllib_exgrpo.cli._run import run_experiment

    quieten()
    settings = dict(args.config)
    if args.seed is not None:
        settings["seed"] = args.seed
    experiment = experiment.changed(settings, args.stop, args.name)
    print("Checking settings, environment and prompts ...", flush=True)
    return run_experiment(
        experiment.checked(),
        storage_path=args.storage_path,
        checkpoint_freq=args.checkpoint_freq,
    )
