"""Which charts a report has, and how the metrics of runs become them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from typing import Any

import numpy as np

from rllib_exgrpo.evaluation.sets import UNNAMED
from rllib_exgrpo.learning_curve import LearningCurve
from rllib_exgrpo.metric_names import find_metric
from rllib_exgrpo.report.runs import Run, varied_settings
from rllib_exgrpo.report.svg import (
    Line,
    Point,
    heat_map,
    line_chart,
    scatter,
    stacked_bars,
    thin,
)

_STEP = "training step"
_MAX_POINTS = 300
_MAX_CELLS = 90
_NUM_COLORS = 8  # with several runs the last one is for all that come after it
_MUTED = "muted"
_MIN_VALUES = 3  # of a setting, for a chart of its own
_MAX_SETTINGS = 6  # with a chart: unrelated runs differ in dozens


@dataclass(frozen=True)
class Chart:
    """Metrics that share axes.

    Attributes:
        title: of the chart.
        metrics: path in a result to the label of its line.
        note: what to look for.
    """

    title: str
    metrics: Mapping[str, str]
    note: str = ""


def _of_learner(**labels: str) -> dict[str, str]:
    return {f"learners/default_policy/{name}": text for name, text in labels.items()}


def _of_runners(**labels: str) -> dict[str, str]:
    return {f"env_runners/{name}": text for name, text in labels.items()}


def _of_replay(**labels: str) -> dict[str, str]:
    return {f"replay/{name}": text for name, text in labels.items()}


SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Training": (
        Chart(
            "Pass rate",
            _of_runners(pass_rate="right"),
            "Right fresh completions of each step.",
        ),
        Chart(
            "Groups that teach nothing",
            _of_runners(zero_advantage_group_fraction="one reward throughout"),
            "All right or all wrong: no advantage.",
        ),
        Chart(
            "Entropy",
            _of_learner(entropy="mean token entropy"),
            "A fall to 0 ends exploration.",
        ),
        Chart(
            "Completion length",
            _of_runners(completion_length_mean="mean", completion_length_max="longest"),
        ),
        Chart(
            "Completions without a usable end",
            _of_runners(
                truncated_fraction="truncated",
                verdict_no_answer_fraction="no answer",
                verdict_answer_unparsed_fraction="answer not understood",
                verdict_timeout_fraction="verifier out of time",
            ),
        ),
        Chart(
            "Gradient norm",
            _of_learner(grad_norm="mean", grad_norm_max="largest"),
            "Over the updates of a step, before clipping.",
        ),
    ),
    "Replay": (
        Chart(
            "Buffer and retirement",
            _of_replay(prompts="in the buffer", retired="retired"),
            "Prompts with stored successes, and prompts solved for good.",
        ),
        Chart("Stored completions", _of_replay(completions="in the buffer")),
        Chart(
            "Prompts of a step",
            {
                **_of_runners(num_prompts="all"),
                **_of_replay(num_prompts_replayed="replayed"),
            },
        ),
        Chart(
            "Part of replayed tokens",
            _of_learner(
                replayed_token_fraction="in the batch",
                replayed_gradient_fraction="in the gradient",
            ),
        ),
    ),
    "Ratios": (
        Chart(
            "Importance ratio",
            _of_learner(
                importance_ratio_fresh_mean="fresh tokens",
                importance_ratio_replayed_mean="replayed tokens",
            ),
            "1 where the current policy would sample the same.",
        ),
        Chart(
            "Saturation of replayed tokens",
            _of_learner(
                replayed_saturated_fraction="shaped weight above 0.9",
                replayed_effective_sample_fraction="effective sample size",
            ),
        ),
        Chart("Clipped fresh tokens", _of_learner(clip_fraction="clipped")),
        Chart(
            "Engine against learner",
            _of_learner(rollout_logp_diff_mean="mean", rollout_logp_diff_max="largest"),
            "Difference of log-probs; a rise means stale or wrong weights.",
        ),
    ),
    "Time": (
        Chart("Sampling speed", _of_runners(tokens_per_second="engines")),
        Chart("Time of a step", {"time_this_iter_s": "whole"}, "Evaluation included."),
    ),
}
"""Title of a section to its charts over training steps."""

_TIME_PARTS = {
    "rollout": ("timers/rollout_s",),
    "update": ("timers/update_s",),
    "plan, record, sync": ("timers/plan_s", "timers/record_s", "timers/sync_s"),
}


def metric_figure(chart: Chart, runs: Sequence[Run]) -> str:
    """Draws metrics over the training steps of all runs.

    With one run the metrics differ in colour. With several the runs do, see
    `runs_legend`, and the metrics in their dashes.
    """
    scale, unit = _scale(next(iter(chart.metrics)))
    several = len(runs) > 1
    lines, entries = [], {}
    for r, run in enumerate(runs):
        for m, (path, metric) in enumerate(chart.metrics.items()):
            xs, ys = thin(run.steps, run.series(path), _MAX_POINTS)
            color, dash = (_run_color(r), m) if several else (m, 0)
            names = [run.label] * several
            names += [metric] * (len(chart.metrics) > 1 or not names)
            label = ", ".join(names)
            lines.append(Line(label, xs, scale * ys, None, None, color, dash))
            if np.isfinite(ys).any():
                entries[metric] = (metric, _MUTED if several else f"c{m}", dash)
    legend = _legend(list(entries.values())) if len(entries) > 1 else ""
    return _lines_figure(chart.title, unit, lines, _STEP, chart.note, legend)


def runs_legend(runs: Sequence[Run]) -> str:
    """Tells the colour of each run; of more than eight, the last ones share one."""
    rest = len(runs) - _NUM_COLORS + 1
    labels = [run.label for run in runs[: _NUM_COLORS - 1]]
    labels += [runs[-1].label] if rest == 1 else [f"{rest} others"] * (rest > 1)
    return _legend([(label, f"c{k}", 0) for k, label in enumerate(labels)], "runs")


def _run_color(number: int) -> int:
    return min(number, _NUM_COLORS - 1)


def setting_figures(runs: Sequence[Run]) -> Iterator[str]:
    """Draws the latest held-out pass@1 against the first numbers that differ."""
    evaluated = [(r, run) for r, run in enumerate(runs) if run.held_out]
    varied = {
        path: values
        for path, values in varied_settings(runs).items()
        if len({values[r] for r, _ in evaluated if _is_number(values[r])})
        >= _MIN_VALUES
    }
    for path, values in islice(varied.items(), _MAX_SETTINGS):
        points = [
            _point(run, float(values[r]), _run_color(r))
            for r, run in evaluated
            if _is_number(values[r])
        ]
        title = f"Held-out pass@1 by {path}"
        note = "Latest evaluation of each run, with its 95 % interval."
        yield figure(title, "%", scatter(points, path, title), note)


def _point(run: Run, x: float, color: int) -> Point:
    names = ("pass_at_1", "pass_at_1_low", "pass_at_1_high")
    y, low, high = (100 * run.held_out.get(name, np.nan) for name in names)
    return Point(run.label, x, y, low, high, color)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def learning_curve_figures(runs: Sequence[Run]) -> Iterator[str]:
    """Draws pass@1 of each evaluation set against completions sampled."""
    names = dict.fromkeys(name for run in runs for name in run.evaluations)
    for name in names:
        lines = []
        for r, run in enumerate(runs):
            if name not in run.evaluations:
                continue
            key = None if name == UNNAMED else name
            curve = LearningCurve.from_results(run.results, run.label, key)
            lines.append(
                Line(
                    run.label, curve.completions, 100 * curve.pass_at_1,
                    100 * curve.low, 100 * curve.high, _run_color(r),
                )
            )  # fmt: skip
        title = "Held-out pass@1" if name == UNNAMED else f"pass@1 on {name}"
        note = "Band: 95 % bootstrap interval over the questions."
        yield _lines_figure(title, "%", lines, "completions sampled for training", note)


def bucket_figure(run: Run, with_label: bool) -> str:
    """Draws how many prompts are at which pass rate, as a heat map over steps."""
    counts = {f"{k}/{n}": run.series(p) for k, n, p in _buckets(run)}
    counts["solved"] = run.series("replay/retired")
    total = np.maximum(sum(np.nan_to_num(c) for c in counts.values()), 1)
    rows = {}
    for label, values in counts.items():
        xs, rows[label] = thin(run.steps, values / total, _MAX_CELLS)
    title = "Pass rate of the prompts" + (f": {run.label}" if with_label else "")
    largest = max(float(np.nanmax(values)) for values in rows.values())
    note = (
        "Prompts in the buffer, by how many of their latest group were right, and "
        f"solved prompts. The strongest colour is {100 * largest:.0f} % of them."
    )
    return figure(title, "", heat_map(xs, rows, _STEP, title), note)


def _buckets(run: Run) -> list[tuple[int, int, str]]:
    names = [n for n in run.results[-1].get("replay", {}) if n.startswith("bucket_")]
    size = len(names)
    return [(k, size, f"replay/bucket_{k}") for k in range(size)]


def time_figure(run: Run, with_label: bool) -> str:
    """Draws the time of each step by its parts."""
    parts = {
        label: np.sum([run.series(path) for path in paths], axis=0)
        for label, paths in _TIME_PARTS.items()
    }
    total = run.series("time_this_iter_s")
    rest = total - np.sum(list(parts.values()), axis=0)
    parts["evaluation and other"] = np.maximum(rest, 0)
    bars = {}
    for label, values in parts.items():
        xs, bars[label] = thin(run.steps, values, _MAX_CELLS)
    title = "Time by part of the step" + (f": {run.label}" if with_label else "")
    legend = _legend([(label, f"c{k}", 0) for k, label in enumerate(bars)])
    return figure(title, "s", stacked_bars(xs, bars, _STEP, title), "", legend)


def figure(title: str, unit: str, svg: str, note: str, legend: str = "") -> str:
    """Wraps a chart with its title, legend and note."""
    of_unit = f" <small>{escape(unit)}</small>" if unit else ""
    remark = f"<p>{escape(note)}</p>" if note else ""
    caption = f"<figcaption>{escape(title)}{of_unit}</figcaption>"
    return f"<figure>{caption}{svg}{legend}{remark}</figure>"


def _lines_figure(
    title: str,
    unit: str,
    lines: Sequence[Line],
    x_label: str,
    note: str,
    legend: str = "",
) -> str:
    shown = [line for line in lines if np.isfinite(line.ys).any()]
    if not shown:
        return figure(title, unit, '<p class="empty">no values</p>', note)
    return figure(title, unit, line_chart(shown, x_label, title), note, legend)


def _legend(entries: Sequence[tuple[str, str, int]], kind: str = "") -> str:
    items = "".join(
        f'<li class="d{dash}" style="--pen:var(--{color})">{escape(label)}</li>'
        for label, color, dash in entries
    )
    return f'<ul class="legend {kind}">{items}</ul>'


def _scale(path: str) -> tuple[float, str]:
    metric = find_metric(path)
    unit = metric.unit if metric else ""
    return (100.0, "%") if unit == "share" else (1.0, unit)


def curve_of(run: Run) -> LearningCurve | None:
    """Returns the main learning curve of a run, None if nothing was evaluated."""
    return (
        LearningCurve.from_results(run.results, run.label) if run.evaluations else None
    )
