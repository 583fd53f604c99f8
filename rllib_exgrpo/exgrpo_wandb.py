"""Tracks trials on Weights & Biases without ever holding them up."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from numbers import Real
from pathlib import Path
from typing import Any
from uuid import uuid4

from ray.tune.experiment import Trial
from ray.tune.logger import LoggerCallback
from ray.tune.result import TRAINING_ITERATION
from ray.tune.utils import flatten_dict
from ray.tune.utils.util import SafeFallbackEncoder

from rllib_exgrpo.evaluation.examples import Example, read_examples

logger = logging.getLogger(__name__)

_ID_FILE = "wandb_run_id"
_EXAMPLES = "evaluation_examples"
_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")
_INIT_TIMEOUT_S = 20.0
_FINISH_TIMEOUT_S = 30.0


class WandbTracker(LoggerCallback):
    """Logs every number of the results, and examples of each evaluation as a table.

    Each trial is a run. Its id lies in the trial's folder, so that a resumed trial goes
    on in the same run. Everything is plotted against `training_iteration`, not against
    W&B's own count of log calls: steps that are made again after a resume are then
    logged again, and none is refused.

    `WANDB_MODE` takes "online" (the default), "offline" and "disabled". Without a key
    or a network one warning is logged and the run is kept offline, to be uploaded with
    `wandb sync` later.

    Args:
        project: on W&B.
        group: of all trials.
        tags: of all trials.
    """

    def __init__(
        self, project: str, *, group: str | None = None, tags: Sequence[str] = ()
    ) -> None:
        self._project = project
        self._group = group
        self._tags = list(tags)
        self._runs: dict[str, Any] = {}

    def log_trial_start(self, trial: Trial) -> None:
        """Begins or continues the trial's run."""
        if trial.trial_id not in self._runs:
            self._runs[trial.trial_id] = self._start(trial)

    def log_trial_result(
        self, iteration: int, trial: Trial, result: dict[str, Any]
    ) -> None:
        """Logs a step; sending it is left to W&B's own process."""
        run = self._runs[trial.trial_id]
        run.log({**_numbers(result), **_table(trial, result)})

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Ends the run; an upload that takes too long is left for `wandb sync`."""
        if run := self._runs.pop(trial.trial_id, None):
            run.finish(exit_code=int(failed))

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        """Ends the runs of trials that were interrupted."""
        for trial in trials:
            self.log_trial_end(trial, failed=True)

    def _start(self, trial: Trial) -> Any:
        import wandb

        mode = os.environ.get("WANDB_MODE") or "online"
        if mode not in _MODES:
            _warn(f"WANDB_MODE is {mode!r}; it takes {', '.join(_MODES)}")
            mode = "offline"
        os.environ["WANDB_MODE"] = mode  # W&B itself fails on others
        if mode == "online" and not has_key():
            _warn("there is no key (`wandb login` stores one)")
            mode = "offline"
        try:
            return self._init(trial, mode)
        except wandb.errors.Error as error:
            _warn(str(error).splitlines()[0])
            return self._init(trial, "offline")

    def _init(self, trial: Trial, mode: Any) -> Any:
        import wandb

        folder = Path(trial.path)
        run = wandb.init(
            project=self._project,
            group=self._group,
            tags=self._tags,
            id=_run_id(folder),
            name=str(trial),
            config=json.loads(json.dumps(trial.config, cls=SafeFallbackEncoder)),
            dir=str(folder),
            mode=mode,
            resume="allow",
            reinit="create_new",  # trials run side by side
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=_INIT_TIMEOUT_S,
                finish_timeout=_FINISH_TIMEOUT_S,
            ),
        )
        run.define_metric(TRAINING_ITERATION)
        run.define_metric("*", step_metric=TRAINING_ITERATION)
        return run


def has_key() -> bool:
    """Tells whether W&B knows a key, without asking for one."""
    import wandb

    return wandb.login(prompt=False)


def _run_id(folder: Path) -> str:
    """Returns the id in a trial's folder, which gets one if it has none."""
    file = folder / _ID_FILE
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid4().hex[:8])
    return file.read_text()


def _warn(reason: str) -> None:
    logger.warning(
        "Weights & Biases keeps this run offline: %s. Training goes on; upload the run "
        "with `wandb sync` later.",
        reason,
    )


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    others = {k: v for k, v in result.items() if k != "config"}
    return {
        path: float(value)
        for path, value in flatten_dict(others, "/").items()
        if isinstance(value, Real)
    }


def _table(trial: Trial, result: Mapping[str, Any]) -> dict[str, Any]:
    """Reads what the trial has kept of the evaluation that belongs to a result."""
    import wandb

    if "evaluation" in result:
        examples = read_examples(trial.path, result[TRAINING_ITERATION])
    elif "evaluation_at_start" in result:
        examples = read_examples(trial.path, 0)
    else:
        return {}
    columns: list[str | int] = [field.name for field in fields(Example)]
    return {_EXAMPLES: wandb.Table(columns, [[*astuple(e)] for e in examples])}
