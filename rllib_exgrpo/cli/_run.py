"""Runs an experiment as one Tune trial, and tells what came of it."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray import tune

from rllib_exgrpo.cli._callbacks import (
    RESULT_FILE,
    PendingWatch,
    ResultFile,
    ResultTable,
)
from rllib_exgrpo.cli._display import Display
from rllib_exgrpo.cli._errors import CommandError, error_summary
from rllib_exgrpo.cli._experiment import Experiment
from rllib_exgrpo.cli._logs import FOLDER as LOGS
from rllib_exgrpo.cli._options import RunOptions
from rllib_exgrpo.cli._progress import Progress, format_duration, outcome
from rllib_exgrpo.cli._ray import ray_started
from rllib_exgrpo.cli._resume import (
    TRIAL_FOLDER,
    ResumePoint,
    find_resume_point,
    how_to_resume,
    write_record,
)
from rllib_exgrpo.cli._signals import say, stop_signals
from rllib_exgrpo.exgrpo import CHECKPOINT_SCORE, ExGRPO
from rllib_exgrpo.exgrpo_config import ExGRPOConfig
from rllib_exgrpo.exgrpo_wandb import WandbTracker
from rllib_exgrpo.learning_curve import read_results
from rllib_exgrpo.metric_names import is_met
from rllib_exgrpo.report.page import write_report

_TRACEBACK_LINES = 8


class _Stopper(tune.Stopper):
    """Ends the trial when a stop criterion is met or the process is told to stop.

    Tune's own way with signals ends it without a checkpoint.
    """

    def __init__(self, stop: Mapping[str, Any]) -> None:
        self.signal: signal.Signals | None = None
        self._stop = dict(stop)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return self.signal is not None or is_met(self._stop, result)

    def stop_all(self) -> bool:
        """Leaves the trial to end by itself, with a checkpoint."""
        return False

    def on_signal(self, number: signal.Signals) -> None:
        """Asks for the end after the step under way."""
        self.signal = number
        say(
            f"\n{number.name}: ending after the step under way, with a checkpoint. "
            "A second one ends at once, without.\n"
        )


def run_experiment(
    experiment: Experiment, options: RunOptions, folder: Path, *, resume: bool = False
) -> int:
    """Trains until a stop criterion is met.

    Args:
        experiment: a checked one.
        options: of the command line.
        folder: for everything that the run writes.
        resume: go on from the latest whole checkpoint in it, if there is one.

    Returns:
        The exit code: 0, or that of the signal which ended the run.

    Raises:
        CommandError: if the machine is too small, or the run failed, with the cause.
    """
    point = find_resume_point(folder) if resume else None
    if point is not None and is_met(experiment.stop, point.results[-1]):
        print("The run has met its stop criterion; --stop sets a later one.")
        return 0
    record = {"name": experiment.name, "stop": dict(experiment.stop)}
    write_record(folder, {**record, "options": asdict(options)})
    display = Display(Progress(experiment.stop))
    stopper = _Stopper(experiment.stop)
    started = time.monotonic()
    _print_start(experiment, folder, point)
    with ExitStack() as stack:
        stack.enter_context(ray_started(experiment.config, folder))
        stack.enter_context(stop_signals(stopper.on_signal))
        tuner = _tuner(experiment, options, folder, point, display, stopper)
        result = _fit(tuner, folder)
    file = folder / TRIAL_FOLDER / RESULT_FILE
    results = read_results(file) if file.is_file() else []
    pictures = _pictures(folder) if results else []
    if result.error is not None:
        raise CommandError(_failure(result.error, results, folder), 1)
    _print_end(results, folder, pictures, started)
    _print_checkpoints(result, experiment.config.best_checkpoint_set)
    if stopper.signal is None:
        return 0
    print(f"Ended by {stopper.signal.name}. {how_to_resume(folder)}")
    return 128 + stopper.signal


def new_folder(storage_path: str, name: str) -> Path:
    """Returns a folder that does not exist: results of two runs never mix."""
    parent = local_folder(storage_path)
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def local_folder(path: str) -> Path:
    """Returns a folder of this machine.

    Raises:
        CommandError: if it is a URI.
    """
    if "://" in path:
        raise CommandError(
            f"--storage-path is {path!r}; give a folder of this machine."
        )
    return Path(path).expanduser()


def _tuner(
    experiment: Experiment,
    options: RunOptions,
    folder: Path,
    point: ResumePoint | None,
    display: Display,
    stopper: tune.Stopper,
) -> tune.Tuner:
    return tune.Tuner(
        ExGRPO,
        param_space=experiment.config,
        tune_config=tune.TuneConfig(
            trial_name_creator=lambda trial: experiment.name,
            trial_dirname_creator=lambda trial: TRIAL_FOLDER,
        ),
        run_config=run_config(experiment, options, folder, display, stopper),
        # Not `Tuner.restore`: Tune's record of a killed run is behind its checkpoints,
        # and may itself have been cut short.
        _tuner_kwargs={"restore": str(point.checkpoint.resolve())} if point else None,
    )


def run_config(
    experiment: Experiment,
    options: RunOptions,
    folder: Path,
    reporter: tune.Callback,
    stop: Any,
) -> tune.RunConfig:
    """Returns what all trials of a run have in common."""
    callbacks = [ResultFile(), ResultTable(), PendingWatch(), reporter]
    if options.wandb:
        tags = options.wandb_tags
        callbacks.append(WandbTracker(options.wandb, group=folder.name, tags=tags))
    return tune.RunConfig(
        name=folder.name,
        storage_path=str(folder.parent.resolve()),
        stop=stop,
        callbacks=callbacks,
        verbose=0,
        checkpoint_config=_checkpoint_config(experiment.config, options),
        failure_config=tune.FailureConfig(max_failures=options.max_failures),
    )


def _checkpoint_config(
    config: ExGRPOConfig, options: RunOptions
) -> tune.CheckpointConfig:
    """Keeps the last checkpoints; with a set to choose by, the best and the last."""
    if config.best_checkpoint_set is None:
        return tune.CheckpointConfig(
            checkpoint_at_end=True,
            checkpoint_frequency=options.checkpoint_freq,
            num_to_keep=options.keep_checkpoints,
        )
    return tune.CheckpointConfig(
        checkpoint_at_end=True,
        # Only what was evaluated can be chosen.
        checkpoint_frequency=config.evaluation_interval,
        num_to_keep=options.keep_checkpoints or 1,
        checkpoint_score_attribute=CHECKPOINT_SCORE,
        checkpoint_score_order="max",
    )


def _fit(tuner: tune.Tuner, folder: Path) -> tune.Result:
    try:
        return tuner.fit()[0]
    except OSError as error:
        raise CommandError(
            f"the results cannot be written: {error}. {how_to_resume(folder)}", 1
        ) from error


def _print_start(
    experiment: Experiment, folder: Path, point: ResumePoint | None
) -> None:
    config = experiment.config
    env = getattr(config.env, "__name__", config.env)
    until = " or ".join(
        f"{path} reaches {value:,g}" for path, value in experiment.stop.items()
    )
    print(f"Training {config.model_name_or_path} on {env} until {until}.")
    if point is not None:
        step = point.results[-1]["training_iteration"]
        print(f"Going on after step {step}, from {point.checkpoint}.")
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
        f"All of it is in {folder / TRIAL_FOLDER / 'error.txt'}, and what the "
        f"processes printed in {folder / LOGS}. {how_to_resume(folder)}"
    )
