"""Resuming a run from its folder, wherever that has been moved to."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_exgrpo.checkpoints import iteration_of, latest_complete
from rllib_exgrpo.cli._callbacks import replace_text, rewind
from rllib_exgrpo.cli._errors import CommandError
from rllib_exgrpo.cli._experiment import Experiment
from rllib_exgrpo.cli.evaluate import stored_config

TRIAL_FOLDER = "trial"

_RECORD = "run.json"


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        checkpoint: the latest whole one.
        results: of the steps before it.
    """

    checkpoint: Path
    results: list[dict[str, Any]]


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Keeps in a run's folder what the checkpoint does not hold: stop criteria, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / _RECORD, json.dumps(record, indent=2) + "\n")


def read_record(folder: Path) -> dict[str, Any]:
    """Reads what `write_record` has kept.

    Raises:
        CommandError: if the folder is no run of `rllib train`.
    """
    try:
        return json.loads((folder / _RECORD).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CommandError(
            f"{folder} cannot be resumed: it has no readable {_RECORD}. Give the "
            "folder that `rllib train` names as its results."
        ) from error


def experiment_of(folder: Path) -> Experiment:
    """Returns what a run trains, as its latest whole checkpoint has it.

    Raises:
        CommandError: if there is none.
    """
    record = read_record(folder)
    checkpoint, _ = latest_complete(folder / TRIAL_FOLDER)
    if any(folder.glob(f"{TRIAL_FOLDER}_*")):
        raise CommandError(
            f"{folder} is a sweep: resume it with its file, `rllib train file PATH "
            f"--resume {folder}`."
        )
    if checkpoint is None:
        raise CommandError(
            f"{folder} cannot be resumed: it has no whole checkpoint. Start it anew; "
            "--checkpoint-freq N saves a checkpoint every N steps."
        )
    stored = stored_config(checkpoint)
    # A trial takes a dict with "class" for a state of RLlib's, which has other keys.
    settings = {
        name: value
        for name, value in stored.to_dict().items()
        if name != "class" and not name.startswith("__")
    }
    config = type(stored)().update_from_dict(settings)
    return Experiment(record["name"], config, record["stop"])


def find_resume_point(folder: Path) -> ResumePoint | None:
    """Finds the latest whole checkpoint of a run, and cuts its results back to it.

    Later steps are made again. Says so if a later checkpoint was cut short.

    Returns:
        None if the run has no whole checkpoint.
    """
    trial = folder / TRIAL_FOLDER
    checkpoint, cut_short = latest_complete(trial)
    for path in cut_short:
        print(f"Passing over {path}: it was not written to its end.")
    if checkpoint is None:
        return None
    return ResumePoint(checkpoint, rewind(trial, iteration_of(checkpoint) or 0))


def how_to_resume(folder: Path) -> str:
    """Tells the command that goes on with a run."""
    checkpoint, _ = latest_complete(folder / TRIAL_FOLDER)
    if checkpoint is None:
        return "There is no checkpoint to resume from."
    return (
        f"`rllib train --resume {folder}` goes on from step {iteration_of(checkpoint)}."
    )
