"""Runs an experiment with search spaces as many Tune trials, and compares them."""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial

from rllib_exgrpo.cli._callbacks import RESULT_FILE, PendingWatch
from rllib_exgrpo.cli._errors import error_summary, out_of_memory
from rllib_exgrpo.cli._experiment import Experiment
from rllib_exgrpo.cli._options import RunOptions
from rllib_exgrpo.cli._progress import format_pass_at_1
from rllib_exgrpo.cli._ray import ray_started
from rllib_exgrpo.cli._resume import write_record
from rllib_exgrpo.cli._signals import say, stop_signals
from rllib_exgrpo.cli._tune import run_config
from rllib_exgrpo.evaluation.metrics import headline
from rllib_exgrpo.exgrpo import ExGRPO
from rllib_exgrpo.learning_curve import read_results
from rllib_exgrpo.metric_names import value_of
from rllib_exgrpo.report.page import write_report


class _Reporter(tune.Callback):
    """Prints a line whenever a trial was evaluated.

    Args:
        searched: paths of the settings to show.
    """

    def __init__(self, searched: Sequence[str]) -> None:
        self._searched = searched

    def on_trial_result(
        self,
        iteration: int,
        trials: list[Trial],
        trial: Trial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """Prints the progress."""
        if "evaluation" in result:
            row = _Outcome.of(trial_number(trial), [result], self._searched)
            print(row.line(), flush=True)


@dataclass(frozen=True)
class _Outcome:
    """How far a trial has come.

    Attributes:
        trial: its number.
        step: of its last result.
        evaluation: its last one; empty if there is none.
        settings: that the sweep varies.
    """

    trial: str
    step: int
    evaluation: Mapping[str, Any]
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls, trial: str, results: Sequence[Mapping[str, Any]], searched: Sequence[str]
    ) -> "_Outcome":
        evaluations = [headline(r["evaluation"]) for r in results if "evaluation" in r]
        last = results[-1]
        return cls(
            trial,
            last["training_iteration"],
            evaluations[-1] if evaluations else {},
            {path: value_of(last["config"], path) for path in searched},
        )

    def line(self) -> str:
        settings = "  ".join(f"{k}={_short(v)}" for k, v in self.settings.items())
        held_out = format_pass_at_1(self.evaluation) or "?"
        return f"{self.trial:>5}  {self.step:>5}  {held_out:>12}  {settings}"


_HEADER = f"{'trial':>5}  {'step':>5}  {'held-out %':>12}  settings"


def run_sweep(
    experiment: Experiment, options: RunOptions, folder: Path, *, resume: bool = False
) -> int:
    """Trains all trials and prints them in the order of held-out pass@1.

    Args:
        experiment: a checked one, with search spaces.
        options: of the command line.
        folder: for everything that the sweep writes.
        resume: go on with the trials in it, each from its last checkpoint.

    Returns:
        The exit code: 0; 1 if a trial failed; or that of the signal which ended it.
    """
    searched = experiment.searched
    if not resume:
        record = {"name": experiment.name, "stop": dict(experiment.stop)}
        write_record(folder, {**record, "options": asdict(options)})
    print(f"Sweeping over {', '.join(searched)}. Results go to {folder}.")
    print(f"\n{_HEADER}", flush=True)
    signals: list[signal.Signals] = []
    with ExitStack() as stack:
        stack.enter_context(ray_started(experiment.largest(), folder))
        stack.enter_context(stop_signals(lambda s: _end(s, signals)))
        tuner = (
            tune.Tuner.restore(
                str(folder.resolve()), trainable=ExGRPO, resume_errored=True
            )
            if resume
            else _tuner(experiment, options, folder)
        )
        grid = tuner.fit()
    outcomes = _outcomes(folder, searched)
    _print_table(folder, outcomes)
    if outcomes:
        print()
        for path in write_report([folder], folder / "report.html"):
            print(f"Report  {path}")
    for result in grid:
        if (error := result.error) is not None:
            why = out_of_memory(error) or error_summary(error)
            trial = folder / Path(result.path).name
            print(f"{trial} failed: {why}\nAll of it is in {trial / 'error.txt'}.")
    if signals:
        print(
            f"Ended by {signals[0].name}. Start the sweep again with --resume, as in "
            f"`rllib train file FILE --resume {folder}`: each trial goes on from its "
            "last checkpoint."
        )
        return 128 + signals[0]
    return 1 if grid.errors else 0


def trial_number(trial: Trial) -> str:
    """Returns the number of a trial in its sweep."""
    return trial.trial_id.rpartition("_")[2].lstrip("0") or "0"


def _tuner(experiment: Experiment, options: RunOptions, folder: Path) -> tune.Tuner:
    given = experiment.tune_config or tune.TuneConfig()
    reporter = _Reporter(experiment.searched)
    return tune.Tuner(
        ExGRPO,
        param_space=experiment.config,
        tune_config=replace(
            given,
            metric=given.metric or _held_out(experiment),
            mode=given.mode or "max",
            trial_name_creator=lambda trial: f"{folder.name}_{trial_number(trial)}",
            trial_dirname_creator=lambda trial: f"trial_{trial_number(trial)}",
        ),
        run_config=run_config(
            experiment.config,
            options,
            folder,
            [PendingWatch(partial(print, flush=True)), reporter],
            dict(experiment.stop),
        ),
    )


def _held_out(experiment: Experiment) -> str:
    """Returns the path of pass@1 of the first evaluation set."""
    first, *_ = next(experiment.variants()).build_evaluation_sets().values()
    return f"{first.path}/pass_at_1"


def _end(number: signal.Signals, signals: list[signal.Signals]) -> None:
    signals.append(number)
    say(f"\n{number.name}: ending. A second one ends at once.\n")
    os.kill(os.getpid(), signal.SIGUSR1)  # on which Tune ends in good order


def _outcomes(folder: Path, searched: Sequence[str]) -> list[_Outcome]:
    """Reads the trials that made a step, best first."""
    found = [
        _Outcome.of(path.name.removeprefix("trial_"), read_results(file), searched)
        for path in folder.glob("trial_*")
        if (file := path / RESULT_FILE).is_file() and file.stat().st_size
    ]
    found.sort(key=lambda o: o.evaluation.get("pass_at_1", -1.0), reverse=True)
    return found


def _print_table(folder: Path, outcomes: Sequence[_Outcome]) -> None:
    """Prints the trials that made a step, and where the best one is."""
    if not outcomes:
        return
    print(f"\nBest first:\n\n{_HEADER}")
    print(*(outcome.line() for outcome in outcomes), sep="\n")
    if outcomes[0].evaluation:
        best = folder / f"trial_{outcomes[0].trial}"
        print(f"\nThe best trial is in {best}.")
        print("Its held-out pass@1 is the best of several, so it flatters a little.")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
