"""Evaluations and comparisons as text tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rllib_exgrpo.evaluation.compare import Comparison
from rllib_exgrpo.evaluation.estimators import powers_of_two
from rllib_exgrpo.evaluation.metrics import metric_sources
from rllib_exgrpo.evaluation.sets import EvaluationSet

_SUMMARY_HEADER = ("pass@1", "pass@{n}", "maj@{n}", "length", "truncated", "format")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines with columns of equal width, the first aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def evaluation_lines(chosen: EvaluationSet, metrics: Mapping[str, float]) -> list[str]:
    """Tells all of one evaluation set: by k, and by source if there are several."""
    num_samples = int(metrics["samples_per_prompt"])
    how = "greedy" if chosen.temperature == 0 else f"temperature {chosen.temperature:g}"
    env = getattr(chosen.env, "__name__", chosen.env)
    sizes = powers_of_two(num_samples)
    kinds = [k for k in ("pass", "maj") if f"{k}_at_{sizes[-1]}" in metrics]
    by_size = [
        [f"{kind}@k", *(_percent(metrics, f"{kind}_at_{k}") for k in sizes)]
        for kind in kinds
    ]
    parts = {"all": "", **{s: f"_of_{s}" for s in metric_sources(metrics)}}
    header = [h.format(n=sizes[-1]) for h in _SUMMARY_HEADER]
    by_source = [
        [name, *_summary(metrics, sizes[-1], end)] for name, end in parts.items()
    ]
    return [
        f"{chosen.name} ({env}, {num_samples} samples a question, {how})",
        "",
        *aligned([["k", *map(str, sizes)], *by_size]),
        "",
        *aligned([["source", "questions", *header], *by_source]),
    ]


def _summary(metrics: Mapping[str, float], k: int, end: str) -> Iterable[str]:
    yield f"{metrics[f'num_prompts{end}']:,.0f}"
    yield from (_percent(metrics, n, end) for n in ("pass_at_1", f"pass_at_{k}"))
    yield _percent(metrics, f"maj_at_{k}", end) if f"maj_at_{k}" in metrics else "-"
    yield f"{metrics[f'completion_length_mean{end}']:,.1f}"
    for name in ("truncated_fraction", "format_fraction"):
        yield f"{100 * metrics[name + end]:.1f} %"


def _percent(metrics: Mapping[str, float], name: str, end: str = "") -> str:
    if name + end not in metrics:
        return "-"
    value, low, high = (
        100 * metrics[f"{name}{part}{end}"] for part in ("", "_low", "_high")
    )
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def comparison_lines(found: Mapping[str, Comparison]) -> list[str]:
    """Tells the comparison of two sides on each evaluation set."""
    header = ["set", "questions", "A", "B", "A - B", "95 % interval", "verdict"]
    return aligned([header, *(_row(name, c) for name, c in found.items())])


def _row(name: str, found: Comparison) -> list[str]:
    return [
        name,
        f"{found.num_questions:,}",
        f"{100 * found.pass_at_1_a:.1f} %",
        f"{100 * found.pass_at_1_b:.1f} %",
        f"{100 * found.difference:+.1f}",
        f"[{100 * found.low:+.1f}, {100 * found.high:+.1f}]",
        found.verdict,
    ]


def metrics_by_set(
    metrics: Mapping[str, Any], names: Iterable[str]
) -> dict[str, Mapping[str, float]]:
    """Returns the metrics of each evaluation set in an evaluation's metrics."""
    return {name: metrics.get(name, metrics) for name in names}
