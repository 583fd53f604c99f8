"""Options that `rllib train` and `rllib example run` share."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rllib_exgrpo.cli._errors import CommandError

if TYPE_CHECKING:  # not imported yet, so that --help need not wait for RLlib
    from rllib_exgrpo.cli._experiment import Experiment


@dataclass(frozen=True)
class RunOptions:
    """Options that a resumed run keeps unless they are given again.

    Attributes:
        checkpoint_freq: steps between checkpoints; 0 saves only the last, None leaves
            it to `checkpoint_config`.
        keep_checkpoints: how many of the latest to keep; None keeps all.
        max_failures: how often a failed run goes on from its latest checkpoint.
        wandb: project on Weights & Biases; None does not track there.
        wandb_tags: of the run there.
    """

    checkpoint_freq: int | None = None
    keep_checkpoints: int | None = None
    max_failures: int = 0
    wandb: str | None = None
    wandb_tags: tuple[str, ...] = ()

    @classmethod
    def from_arguments(
        cls, args: argparse.Namespace, earlier: Mapping[str, Any]
    ) -> Self:
        """Takes the options of the command line, else the earlier, else defaults."""
        given = {f.name: getattr(args, f.name) for f in fields(cls)}
        return cls(**{**earlier, **{k: v for k, v in given.items() if v is not None}})

    def check(self, best_checkpoint_set: str | None) -> None:
        """Checks that options do not contradict the set that chooses checkpoints.

        Raises:
            CommandError: for an option that does.
        """
        for name in ("checkpoint_freq", "keep_checkpoints"):
            value = getattr(self, name)
            if best_checkpoint_set is not None and value is not None:
                raise CommandError(
                    f"--{name.replace('_', '-')} is {value}, but the config sets "
                    f"`best_checkpoint_set` to {best_checkpoint_set!r}: a checkpoint "
                    "is saved with each evaluation, and the best and the last are "
                    "kept. Leave out one of the two."
                )


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
        metavar="N",
        help="save a checkpoint every N steps, 0 for none but the last (default: 10 "
        "or, with `best_checkpoint_set`, at each evaluation)",
    )
    parser.add_argument(
        "--keep-checkpoints",
        type=int,
        metavar="N",
        help="keep only the latest N checkpoints (default: all or, with "
        "`best_checkpoint_set`, the best and the last)",
    )
    parser.add_argument(
        "--max-failures",
        type=int,
        metavar="N",
        help="after a failure go on from the latest checkpoint, up to N times "
        f"(default: {RunOptions.max_failures})",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="go on from the latest checkpoint in a run's folder, which may have been "
        "moved; without RUN, of the run of this name, if there is one",
    )
    parser.add_argument(
        "--wandb",
        metavar="PROJECT",
        help="track the run on Weights & Biases; WANDB_MODE=offline keeps it here",
    )
    parser.add_argument(
        "--wandb-tags", nargs="+", metavar="TAG", help="tags of the run there"
    )


def run_with_options(experiment: "Experiment", args: argparse.Namespace) -> int:
    """Runs an experiment with the options of the command line.

    Returns:
        The exit code.
    """
    from rllib_exgrpo.cli._experiment_checks import warn_of_memory
    from rllib_exgrpo.cli._ray import quieten
    from rllib_exgrpo.cli._resume import read_record
    from rllib_exgrpo.cli._run import local_folder, new_folder, run_experiment
    from rllib_exgrpo.cli._sweep import run_sweep

    quieten()
    experiment = with_settings(experiment, args)
    print("Checking settings, environment and prompts ...", flush=True)
    experiment = experiment.checked()
    warn_of_memory(experiment.largest())
    if args.resume:
        folder = Path(args.resume)
    elif args.resume is None:
        folder = new_folder(args.storage_path, experiment.name)
    else:
        folder = local_folder(args.storage_path) / experiment.name
    resume = folder.exists()
    earlier = read_record(folder)["options"] if resume else {}
    options = RunOptions.from_arguments(args, earlier)
    options.check(experiment.config.best_checkpoint_set)
    train = run_sweep if experiment.searched else run_experiment
    return train(experiment, options, folder, resume=resume)


def resume_with_options(args: argparse.Namespace) -> int:
    """Resumes a run with the settings that it had.

    Returns:
        The exit code.
    """
    from rllib_exgrpo.cli._resume import experiment_of

    return run_with_options(experiment_of(Path(args.resume)), args)


def with_settings(experiment: "Experiment", args: argparse.Namespace) -> "Experiment":
    """Returns an experiment with the settings of the command line."""
    settings = dict(args.config)
    if args.seed is not None:
        settings["seed"] = args.seed
    return experiment.changed(settings, args.stop, args.name)
