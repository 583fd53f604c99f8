"""Learning curves: held-out pass@1 against completions sampled, as a picture.

Completions are what sampling costs. A replayed prompt needs one completion fewer than
a fresh one, so runs with and without replay are not compared by steps.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.evaluation.metrics import headline

_COMPLETIONS = "num_env_steps_sampled_lifetime"
_MAX_NAMED = 7  # curves with a colour and a name; those after them are grey
_MAX_STARTS = 3  # curves that also show where replay starts


@dataclass(frozen=True)
class LearningCurve:
    """The evaluations of one run.

    Attributes:
        label: name in the legend.
        completions: (N,) completions sampled for training before each evaluation.
        pass_at_1: (N,) held-out pass@1, from 0 to 1.
        low: (N,) lower end of its 95 % interval; NaN if unknown.
        high: (N,) upper end.
        replay_start: completions sampled before the first step that replayed; None if
            none did.
    """

    label: str
    completions: NDArray[np.float64]
    pass_at_1: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    replay_start: float | None = None

    @classmethod
    def from_results(
        cls,
        results: Sequence[Mapping[str, Any]],
        label: str,
        evaluation_set: str | None = None,
    ) -> Self:
        """Reads the evaluations out of the results of a run, in their order.

        Args:
            results: nested result dicts, as `train()` returns them.
            label: name in the legend.
            evaluation_set: a named one; None takes the unnamed one, or else the first.

        Raises:
            ValueError: if none of them holds an evaluation.
        """
        points = list(_evaluations(results, evaluation_set))
        if not points:
            raise ValueError(
                f"The run {label!r} holds no evaluation to draw. Set "
                "`evaluation_interval` in its config, and train on."
            )
        completions, pass_at_1, low, high = np.array(points).T
        return cls(label, completions, pass_at_1, low, high, _replay_start(results))


def _evaluations(
    results: Sequence[Mapping[str, Any]], evaluation_set: str | None
) -> Iterator[tuple[float, float, float, float]]:
    """Yields completions, and pass@1 with its interval, of each evaluation."""
    for result in results:
        now = float(result["env_runners"][_COMPLETIONS])
        for key, completions in (("evaluation_at_start", 0.0), ("evaluation", now)):
            found = result.get(key, {})
            found = found.get(evaluation_set, {}) if evaluation_set else headline(found)
            if "pass_at_1" in found:
                low, high = (
                    found.get(f"pass_at_1_{end}", np.nan) for end in ("low", "high")
                )
                yield completions, found["pass_at_1"], low, high


def _replay_start(results: Sequence[Mapping[str, Any]]) -> float | None:
    before = 0.0
    for result in results:
        if result.get("replay", {}).get("num_prompts_replayed", 0) > 0:
            return before
        before = float(result["env_runners"][_COMPLETIONS])
    return None


def read_results(run: str | Path) -> list[dict[str, Any]]:
    """Reads the results of a run that Tune has written.

    Args:
        run: a `result.json`, or a folder that holds exactly one, however deep.

    Returns:
        One nested dict a training step; of a step that was made again after a resume,
        the last. A last line that is still being written is left out.

    Raises:
        ValueError: if there is no such file, or more than one.
    """
    run = Path(run)
    files = [run] if run.is_file() else sorted(run.rglob("result.json"))
    if len(files) != 1:
        found = ", ".join(map(str, files)) or "none"
        raise ValueError(
            f"{run} must be a run's result.json, or a folder with exactly one; found "
            f"{found}."
        )
    lines = files[0].read_text().split("\n")
    results = [json.loads(line) for line in lines[:-1]]
    return list({result["training_iteration"]: result for result in results}.values())


def save_plot(curves: Sequence[LearningCurve], path: str | Path) -> Path:
    """Draws learning curves, each with the band of its 95 % intervals.

    Args:
        curves: one a run.
        path: of the PNG, which is replaced in one go.

    Returns:
        The path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display and leaves the user's backend alone
    _draw(figure.add_subplot(), curves)
    figure.legend(
        frameon=False,
        fontsize="small",
        loc="outside lower left",
        ncols=min(2, len(curves)),
    )
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    figure.savefig(unfinished, format="png", dpi=160)
    unfinished.replace(path)
    return path


def _draw(axes: Any, curves: Sequence[LearningCurve]) -> None:
    for index, curve in enumerate(curves):
        is_named = index < _MAX_NAMED or len(curves) == _MAX_NAMED + 1
        _draw_curve(axes, curve, f"C{index}" if is_named else "0.75", is_named)
    if len(curves) <= _MAX_STARTS:
        for index, curve in enumerate(curves):
            _draw_replay_start(axes, curve, f"C{index}")
    axes.set_title(
        "Held-out pass@1 (band: 95 % interval)", loc="left", fontsize="medium"
    )
    axes.set_xlabel("completions sampled for training")
    axes.set_ylabel("held-out pass@1 (%)")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_curve(axes: Any, curve: LearningCurve, color: str, is_named: bool) -> None:
    mean = 100 * curve.pass_at_1
    axes.plot(
        curve.completions,
        mean,
        color=color,
        marker="o",
        markersize=4,
        label=f"{curve.label} ({mean[0]:.1f} → {mean[-1]:.1f} %)" if is_named else None,
    )
    axes.fill_between(
        curve.completions,
        100 * curve.low,
        100 * curve.high,
        color=color,
        alpha=0.18,
        lw=0,
    )


def _draw_replay_start(axes: Any, curve: LearningCurve, color: str) -> None:
    if curve.replay_start is not None:
        axes.axvline(
            curve.replay_start,
            color=color,
            linestyle=":",
            label=f"{curve.label}: replay starts",
        )
