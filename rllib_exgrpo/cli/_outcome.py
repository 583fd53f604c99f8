"""What is told before a run starts, after it has ended, and when it fails."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_exgrpo.checkpoints import iteration_of, latest_complete
from rllib_exgrpo.cli._errors import error_summary, out_of_memory
from rllib_exgrpo.cli._experiment import Experiment
from rllib_exgrpo.cli._logs import FOLDER as LOGS
from rllib_exgrpo.cli._progress import format_duration, outcome
from rllib_exgrpo.cli._resume import TRIAL_FOLDER, ResumePoint, how_to_resume
from rllib_exgrpo.exgrpo_lifecycle import CHECKPOINT_SCORE

_TRACEBACK_LINES = 8


def print_start(
    experiment: Experiment, folder: Path, point: ResumePoint | None
) -> None:
    """Tells what is trained, from where on, until when and where its results go."""
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


def print_end(
    results: Sequence[Mapping[str, Any]],
    folder: Path,
    pictures: Sequence[Path],
    seconds: float,
) -> None:
    """Tells what came of a run and where it lies.

    Args:
        results: of all its steps, also of those before a resume.
        folder: of the run.
        pictures: that were drawn of it.
        seconds: since the command started.
    """
    print(f"\n{outcome(results)}\n")
    print(f"Time        {format_duration(seconds)}")
    print(f"Results     {folder}")
    for path in pictures:
        print(f"Report      {path}")
    print(f"Logs        {folder / LOGS}")
    trial = folder / TRIAL_FOLDER
    latest, best = latest_complete(trial)[0], best_checkpoint(trial, results)
    for name, checkpoint in (("Checkpoint", latest), ("Best", best)):
        if checkpoint is not None:
            print(f"{name:10}  {os.path.relpath(checkpoint)}")
    if chosen := best or latest:
        print(f"\nEvaluate it again with `rllib evaluate {os.path.relpath(chosen)}`.")


def best_checkpoint(trial: Path, results: Sequence[Mapping[str, Any]]) -> Path | None:
    """Finds the whole checkpoint with the best score; None if none has a score.

    Args:
        trial: folder of the trial.
        results: of all its steps. Tune knows only those since a resume.
    """
    scores = {r["training_iteration"]: r[CHECKPOINT_SCORE] for r in results}
    found = [
        (score, path)
        for path in trial.glob("checkpoint_*")
        if not math.isnan(score := scores.get(iteration_of(path), math.nan))
    ]
    return max(found)[1] if found else None


def failure(
    error: BaseException, results: Sequence[Mapping[str, Any]], folder: Path
) -> str:
    """Tells when and why the trial failed, with the end of the remote traceback."""
    when = f"after step {len(results)}" if results else "before the end of step 1"
    why = out_of_memory(error)
    if not why:
        lines = str(error).rstrip().splitlines()
        end = "\n".join(f"    {line}" for line in lines[-_TRACEBACK_LINES:])
        why = f"{error_summary(error)}\nThe traceback ends with\n{end}"
    return (
        f"the run failed {when}: {why}\n"
        f"All of it is in {folder / TRIAL_FOLDER / 'error.txt'}, and what the "
        f"processes printed in {folder / LOGS}. {how_to_resume(folder)}"
    )
