"""Runs an experiment as one Tune trial, and tells what came of it."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import tune

from rllib_exgrpo.cli._display import Display
from rllib_exgrpo.cli._errors import CommandError, error_summary
from rllib_exgrpo.cli._experiment import Experiment
from rllib_exgrpo.cli._logs import FOLDER as LOGS
from rllib_exgrpo.cli._progress import Progress, format_duration, outcome
from rllib_exgrpo.cli._ray import ray_started
from rllib_exgrpo.exgrpo import CHECKPOINT_SCORE, ExGRPO
from rllib_exgrpo.exgrpo_config import ExGRPOConfig
from rllib_exgrpo.metric_names import is_met
from rllib_exgrpo.report.page import write_report

_TRIAL_FOLDER = "trial"
_TRACEBACK_LINES = 8
_INTERRUPTED = 130  # as shells report an end by Ctrl-C


def run_experiment(
    experiment: Experiment, *, storage_path: str, checkpoint_freq: int = 0
) -> int:
    """Trains until a stop criterion is met.

    Args:
        experiment: a checked one.
        storage_path: local folder for the run's own folder.
        checkpoint_freq: steps between checkpoints; 0 saves only the last.

    Returns:
        The exit code: 0, or 130 if the run was interrupted.

    Raises:
        CommandError: if the machine is too small, or the run failed, with the cause.
    """
    folder = _new_folder(storage_path, experiment.name)
    reporter = Display(Progress(experiment.stop))
    started = time.monotonic()
    _print_start(experiment, folder)
    with ray_started(experiment.config, folder):
        result = _tuner(experiment, folder, reporter, checkpoint_freq).fit()[0]
    pictures = _pictures(folder) if reporter.results else []
    if result.error is not None:
        raise CommandError(_failure(result.error, reporter.results, folder), 1)
    interrupted = not any(is_met(experiment.stop, r) for r in reporter.results[-1:])
    if interrupted:
        print(f"\nInterrupted after {len(reporter.results)} steps.")
    _print_end(reporter.results, folder, pictures, started)
    _print_checkpoints(result, experiment.config.best_checkpoint_set)
    return _INTERRUPTED if interrupted else 0


def _new_folder(storage_path: str, name: str) -> Path:
    """Returns a folder that does not exist: results of two runs never mix."""
    if "://" in storage_path:
        raise CommandError(
            f"--storage-path is {storage_path!r}; give a folder of this machine."
        )
    parent = Path(storage_path).expanduser()
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def _tuner(
    experiment: Experiment, folder: Path, reporter: Display, checkpoint_freq: int
) -> tune.Tuner:
    return tune.Tuner(
        ExGRPO,
        param_space=experiment.config,
        tune_config=tune.TuneConfig(
            trial_name_creator=lambda trial: experiment.name,
            trial_dirname_creator=lambda trial: _TRIAL_FOLDER,
        ),
        run_config=tune.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent.resolve()),
            stop=dict(experiment.stop),
            callbacks=[reporter],
            verbose=0,
            checkpoint_config=_checkpoint_config(experiment.config, checkpoint_freq),
        ),
    )


def _checkpoint_config(config: ExGRPOConfig, frequency: int) -> tune.CheckpointConfig:
    """Keeps the last checkpoint; with a set to choose by, the best one too."""
    if config.best_checkpoint_set is None:
        return tune.CheckpointConfig(
            checkpoint_at_end=True, checkpoint_frequency=frequency
        )
    return tune.CheckpointConfig(
        checkpoint_at_end=True,
        # Only what was evaluated can be chosen.
        checkpoint_frequency=config.evaluation_interval,
        num_to_keep=1,
        checkpoint_score_attribute=CHECKPOINT_SCORE,
        checkpoint_score_order="max",
    )


def _print_start(experiment: Experiment, folder: Path) -> None:
    config = experiment.config
    env = getattr(config.env, "__name__", config.env)
    until = " or ".join(
        f"{path} reaches {value:,g}" for path, value in experiment.stop.items()
    )
    print(f"Training {config.model_name_or_path} on {env} until {until}.")
    print(
        f"Results go to {folder}, logs to {folder / LOGS}. Starting Ray, engines and "
        "learners ...",
        flush=True,
    )


def _pictures(folder: Path) -> list[Path]:
    """Writes report and learning curve into the run's folder."""
    return write_report([folder], folder / "report.html")


def _print_end(
    results: Sequence[Mapping[str, Any]],
    folder: Path,
    pictures: Sequence[Path],
    started: float,
) -> None:
    print(f"\n{outcome(results)}\n")
    print(f"Time        {format_duration(time.monotonic() - started)}")
    print(f"Results     {folder}")
    for path in pictures:
        print(f"Report      {path}")
    print(f"Logs        {folder / LOGS}")


def _print_checkpoints(result: tune.Result, best_set: str | None) -> None:
    if result.checkpoint is None:
        print("Checkpoint  none; `--checkpoint-freq N` saves one every N steps")
        return
    path = os.path.relpath(result.checkpoint.path)
    print(f"Checkpoint  {path}")
    if best_set is not None:
        best = result.get_best_checkpoint(CHECKPOINT_SCORE, "max")
        path = os.path.relpath(best.path)
        print(f"Best        {path}, by pass@1 of {best_set}")
    print(f"\nEvaluate it again with `rllib evaluate {path}`.")


def _failure(
    error: BaseException, results: Sequence[Mapping[str, Any]], folder: Path
) -> str:
    """Tells when and why the trial failed, with the end of the remote traceback."""
    when = f"after step {len(results)}" if results else "before the end of step 1"
    lines = str(error).rstrip().splitlines()
    end = "\n".join(f"    {line}" for line in lines[-_TRACEBACK_LINES:])
    return (
        f"the run failed {when}: {error_summary(error)}\n"
        f"The traceback ends with\n{end}\n"
        f"All of it is in {folder / _TRIAL_FOLDER / 'error.txt'}, and what the "
        f"processes printed in {folder / LOGS}."
    )
