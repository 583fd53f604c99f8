"""Tune callbacks of every run: its results on disk at once, and word of a long wait."""

import csv
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback
from ray.tune.result import TRAINING_ITERATION
from ray.tune.utils import flatten_dict
from ray.tune.utils.util import SafeFallbackEncoder
from ray.util.placement_group import placement_group_table

from rllib_exgrpo.learning_curve import read_results

RESULT_FILE = "result.json"
RESULT_TABLE = "progress.csv"

_WAIT_S = 30.0


class ResultFile(JsonLoggerCallback):
    """Writes `result.json` into the run's folder at once.

    Tune's own is copied there every ten seconds or so. After a kill it would lack steps
    that a checkpoint has already seen.
    """

    def log_trial_start(self, trial: Trial) -> None:
        """Writes the trial's settings, and cuts back to the step it goes on from."""
        trial.init_local_path()
        self.update_config(trial, trial.config)
        point = trial.latest_checkpoint_result
        metrics = point.metrics if point else {TRAINING_ITERATION: 0}
        if TRAINING_ITERATION in metrics:  # not so for a run that `--resume` cut back
            rewind(_folder(trial), metrics[TRAINING_ITERATION])

    def log_trial_result(
        self, iteration: int, trial: Trial, result: dict[str, Any]
    ) -> None:
        """Appends a line."""
        line = json.dumps(result, cls=SafeFallbackEncoder) + "\n"
        with (_folder(trial) / RESULT_FILE).open("a") as file:
            file.write(line)


class ResultTable(CSVLoggerCallback):
    """Writes `progress.csv` into the run's folder at once.

    Unlike Tune's own it keeps to the columns of its first row when a run is resumed.
    """

    def log_trial_result(
        self, iteration: int, trial: Trial, result: dict[str, Any]
    ) -> None:
        """Appends a row."""
        append_row(_folder(trial) / RESULT_TABLE, result)


def rewind(trial: Path, iteration: int) -> list[dict[str, Any]]:
    """Cuts the files of a trial's results back to a step; later ones are made again.

    Returns:
        The results up to that step.
    """
    file, table = trial / RESULT_FILE, trial / RESULT_TABLE
    every = read_results(file) if file.is_file() else []
    results = [r for r in every if r[TRAINING_ITERATION] <= iteration]
    # Also where no step is taken back: a kill may have left half a line.
    replace_text(file, "".join(json.dumps(result) + "\n" for result in results))
    table.unlink(missing_ok=True)
    for result in results:
        append_row(table, result)
    return results


def replace_text(path: Path, text: str) -> None:
    """Writes a file in one go: a reader sees the old or the new one."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(text)
    unfinished.replace(path)


def append_row(path: Path, result: Mapping[str, Any]) -> None:
    """Appends a result to a table, whose columns the first result has set."""
    row = flatten_dict({k: v for k, v in result.items() if k != "config"}, "/")
    with path.open("a+", newline="") as file:
        file.seek(0)
        columns = next(csv.reader(file), None)
        table = csv.DictWriter(file, columns or list(row), extrasaction="ignore")
        if columns is None:
            table.writeheader()
        table.writerow(row)


def _folder(trial: Trial) -> Path:
    folder = Path(trial.path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class PendingWatch(tune.Callback):
    """Says once a minute what a run waits for while no trial gets its resources.

    Args:
        say: tells the user something.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._idle_since: float | None = None
        self._foreign_groups: set[str] = set()

    def setup(self, *args: Any, **info: Any) -> None:
        """Notes which resources others have taken before the run."""
        self._foreign_groups = set(placement_group_table())

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Looks at the trials after each event."""
        pending = [trial for trial in trials if trial.status == Trial.PENDING]
        now = time.monotonic()
        if not pending or any(trial.status == Trial.RUNNING for trial in trials):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > _WAIT_S:
            self._idle_since = now + _WAIT_S
            if not self._is_starting(pending[0]):
                self._say(_waiting_for(pending[0]))

    def _is_starting(self, trial: Trial) -> bool:
        """Whether it, or another trial of the run, has its room and starts engines."""
        wanted = trial.placement_group_factory.bundles
        states = [
            group["state"]
            for name, group in placement_group_table().items()
            if name not in self._foreign_groups
            and list(group["bundles"].values()) == wanted
        ]
        return "CREATED" in states or "PENDING" not in states


def _waiting_for(trial: Trial) -> str:
    free = ray.available_resources()
    missing = ", ".join(
        f"{amount:g} {name}s ({free.get(name, 0):g} free)"
        for name, amount in trial.placement_group_factory.required_resources.items()
    )
    return (
        f"Waiting for room: a trial needs {missing}. Other jobs may hold them; "
        "`ray status` tells. To need fewer, lower `num_env_runners` or `num_learners`."
    )
