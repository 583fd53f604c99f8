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

    Raises:
        ValueError: for a folder without a run.
    """
    names = [Path(path).resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return list(chain.from_iterable(map(_runs_in, paths, names)))


def _runs_in(path: str | Path, name: str) -> list[Run]:
    files = sorted(Path(path).rglob("result.json"))
    if not files:
        raise ValueError(f"{path} holds no run: there is no result.json in it.")
    if len(files) == 1:
        return [read_run(files[0], name)]
    return [read_run(file, f"{name}/{file.parent.name}") for file in files]
