"""Runs an experiment as one Tune trial, and tells what came of it."""

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray import tune

from rllib_exgrpo.cli._callbacks import RESULT_FILE, PendingWatch
from rllib_exgrpo.cli._display import Display
from rllib_exgrpo.cli._errors import CommandError
from rllib_exgrpo.cli._experiment import Experiment
from rllib_exgrpo.cli._options import RunOptions
from rllib_exgrpo.cli._outcome import failure, print_end, print_start
from rllib_exgrpo.cli._progress import Progress
from rllib_exgrpo.cli._ray import ray_started
from rllib_exgrpo.cli._resume import (
    TRIAL_FOLDER,
    ResumePoint,
    find_resume_point,
    how_to_resume,
    write_record,
)
from rllib_exgrpo.cli._signals import stop_signals
from rllib_exgrpo.cli._tune import run_config
from rllib_exgrpo.exgrpo import ExGRPO
from rllib_exgrpo.learning_curve import read_results
from rllib_exgrpo.metric_names import is_met
from rllib_exgrpo.report.page import write_report


class _Stopper(tune.Stopper):
    """Ends the trial when a stop criterion is met or the process is told to stop.

    Tune's own way with signals ends it without a checkpoint.

    Args:
        stop: metric path to the value that ends the run.
        say: tells the user something.
    """

    def __init__(self, stop: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self.signal: signal.Signals | None = None
        self._stop = dict(stop)
        self._say = say

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return self.signal is not None or is_met(self._stop, result)

    def stop_all(self) -> bool:
        """Leaves the trial to end by itself, with a checkpoint."""
        return False

    def on_signal(self, number: signal.Signals) -> None:
        """Asks for the end after the step under way."""
        self.signal = number
        self._say(
            f"{number.name}: ending after the step under way, with a checkpoint. "
            "A second one ends at once, without."
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
    earlier = point.results if point else []
    if any(is_met(experiment.stop, result) for result in earlier[-1:]):
        print("The run has met its stop criterion; --stop sets a later one.")
        return 0
    record = {"name": experiment.name, "stop": dict(experiment.stop)}
    write_record(folder, {**record, "options": asdict(options)})
    display = Display(Progress(experiment.stop, earlier), latest=earlier[-1:])
    stopper = _Stopper(experiment.stop, display.say)
    started = time.monotonic()
    print_start(experiment, folder, point)
    with ExitStack() as stack:
        stack.enter_context(ray_started(experiment.config, folder))
        stack.enter_context(stop_signals(stopper.on_signal))
        tuner = _tuner(experiment, options, folder, point, display, stopper)
        result = _fit(tuner, folder)
    file = folder / TRIAL_FOLDER / RESULT_FILE
    results = read_results(file) if file.is_file() else []
    pictures = write_report([folder], folder / "report.html") if results else []
    if result.error is not None:
        raise CommandError(failure(result.error, results, folder), 1)
    print_end(results, folder, pictures, time.monotonic() - started)
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
        run_config=run_config(
            experiment.config,
            options,
            folder,
            [PendingWatch(display.say), display],
            stopper,
        ),
        # Not `Tuner.restore`: Tune's record of a killed run is behind its checkpoints,
        # and may itself have been cut short.
        _tuner_kwargs={"restore": str(point.checkpoint.resolve())} if point else None,
    )


def _fit(tuner: tune.Tuner, folder: Path) -> tune.Result:
    try:
        return tuner.fit()[0]
    except OSError as error:
        raise CommandError(
            f"the results cannot be written: {error}. {how_to_resume(folder)}", 1
        ) from error
