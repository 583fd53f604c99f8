"""Reads what a run has left in its folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.evaluation.examples import Example, read_examples
from rllib_exgrpo.evaluation.metrics import headline
from rllib_exgrpo.evaluation.sets import UNNAMED
from rllib_exgrpo.learning_curve import read_results
from rllib_exgrpo.metric_names import value_of
from rllib_exgrpo.replay.audit import AUDIT_FOLDER, Audit
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.versions import read_versions


@dataclass(frozen=True)
class Run:
    """A run, finished or not.

    Attributes:
        label: its name in the report.
        results: one nested dict a training step.
        config: setting to value, as text where JSON has no such value.
        versions: package to version.
        examples: completions of its last evaluation.
        replayed: the audit's rows of the latest step that replayed.
    """

    label: str
    results: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    examples: Sequence[Example]
    replayed: Sequence[Mapping[str, Any]] = ()

    @property
    def steps(self) -> NDArray[np.float64]:
        """(N,) training steps."""
        return np.array([float(r["training_iteration"]) for r in self.results])

    def series(self, path: str) -> NDArray[np.float64]:
        """Returns the (N,) values of a metric; NaN where it is missing."""
        values = (value_of(result, path) for result in self.results)
        return np.array([np.nan if v is None else float(v) for v in values])

    @property
    def evaluations(self) -> dict[str, Mapping[str, float]]:
        """The metrics of the latest evaluation of each set."""
        found: dict[str, Mapping[str, float]] = {}
        for result in self.results:
            for key in ("evaluation_at_start", "evaluation"):
                evaluation = result.get(key, {})
                if "pass_at_1" in evaluation:
                    found[UNNAMED] = evaluation
                found |= {n: m for n, m in evaluation.items() if isinstance(m, Mapping)}
        return found

    @property
    def held_out(self) -> Mapping[str, float]:
        """The metrics of the latest evaluation's first set; empty without one."""
        found = [headline(r["evaluation"]) for r in self.results if "evaluation" in r]
        return found[-1] if found else {}


def read_run(file: Path, label: str) -> Run:
    """Reads a run from the folder of its `result.json`.

    Raises:
        ValueError: if it has not finished a step.
    """
    results = read_results(file)
    if not results:
        raise ValueError(f"{file} holds no finished training step to report.")
    folder = file.parent
    config_file = folder / "params.json"
    return Run(
        label,
        results,
        json.loads(config_file.read_text()) if config_file.is_file() else {},
        read_versions(folder),
        read_examples(folder),
        Audit(Folder.at(folder / AUDIT_FOLDER)).latest().to_pylist(),
    )


def find_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Reads the runs in folders, all trials of a sweep included.

    Returns:
        The runs in the order of the folders; those of one folder by their latest
        held-out pass@1, best first.

    Raises:
        ValueError: for a folder without a run.
    """
    names = [Path(path).resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    prefixes = [f"{name}/" if len(paths) > 1 else "" for name in names]
    return list(chain.from_iterable(map(_runs_in, map(Path, paths), names, prefixes)))


def _runs_in(path: Path, name: str, prefix: str) -> list[Run]:
    files = sorted(path.rglob("result.json"))
    if not files:
        raise ValueError(f"{path} holds no run: there is no result.json in it.")
    if len(files) == 1:
        return [read_run(files[0], name)]
    # A trial of a sweep that has failed at once has nothing to tell.
    runs = [
        read_run(file, prefix + _own_name(file.parent.relative_to(path)))
        for file in files
        if file.stat().st_size
    ]
    return sorted(runs, key=lambda run: -run.held_out.get("pass_at_1", -1.0))


def _own_name(folder: Path) -> str:
    """Names a run, or a trial of a sweep, by its folder."""
    is_trial_of_run = folder.name == "trial" and len(folder.parts) > 1
    return (folder.parent if is_trial_of_run else folder).as_posix()


def varied_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Returns the settings that differ between runs, nested ones by their path.

    Returns:
        Path to one value a run, None where a run does not have it.
    """
    columns = [_flat(run.config) for run in runs]
    paths = sorted({path for column in columns for path in column})
    values = {path: [column.get(path) for column in columns] for path in paths}
    return {p: v for p, v in values.items() if any(other != v[0] for other in v)}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}/")
        else:
            found[prefix + name] = value
    return found
