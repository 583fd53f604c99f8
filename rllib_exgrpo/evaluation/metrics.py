"""The metrics of an evaluation, from the results of its questions."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.evaluation.estimators import (
    bootstrap_means,
    pass_at_k,
    percentile_interval,
    powers_of_two,
)
from rllib_exgrpo.evaluation.questions import Question


def evaluation_metrics(questions: Sequence[Question]) -> dict[str, float]:
    """Summarises the questions of one evaluation set.

    Args:
        questions: at least one.

    Returns:
        Metric name to value; where there are several sources also `NAME_of_SOURCE`.
    """
    metrics = _summary(questions)
    by_source: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_source[question.source].append(question)
    if len(by_source) > 1:
        for source, part in sorted(by_source.items()):
            for name, value in _summary(part).items():
                metrics[f"{name}_of_{source}"] = value
    return metrics


def _summary(questions: Sequence[Question]) -> dict[str, float]:
    num_samples = min(q.num_samples for q in questions)
    scores = _scores(questions, num_samples)
    values_PM = np.stack(list(scores.values()), axis=1)
    resampled = bootstrap_means(values_PM, [q.source for q in questions])
    low_M, high_M = percentile_interval(resampled)
    metrics: dict[str, float] = {}
    for name, mean, low, high in zip(
        scores, values_PM.mean(axis=0), low_M, high_M, strict=True
    ):
        metrics |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    num_completions = sum(q.num_samples for q in questions)
    metrics |= {
        "pass_at_1_stderr": _standard_error(scores["pass_at_1"]),
        "num_prompts": len(questions),
        "num_completions": num_completions,
        "samples_per_prompt": num_samples,
        "completion_length_mean": float(np.mean([q.length_mean for q in questions])),
        "truncated_fraction": sum(q.num_truncated for q in questions) / num_completions,
        "format_fraction": sum(q.num_formatted for q in questions) / num_completions,
    }
    return {name: float(value) for name, value in metrics.items()}


def _scores(
    questions: Sequence[Question], num_samples: int
) -> dict[str, NDArray[np.float64]]:
    """Returns pass@k and maj@k of each question, for k = 1, 2, 4, ... samples."""
    sizes = powers_of_two(num_samples)
    scores = {
        f"pass_at_{k}": np.array(
            [pass_at_k(q.num_samples, q.num_correct, k) for q in questions]
        )
        for k in sizes
    }
    if all(q.majority is not None for q in questions):
        for index, k in enumerate(sizes[1:]):
            scores[f"maj_at_{k}"] = np.array(
                [q.majority[index] for q in questions if q.majority is not None]
            )
    return scores


def _standard_error(rates_P: NDArray[np.float64]) -> float:
    """Standard error of the mean over questions, each one observation."""
    if len(rates_P) < 2:
        return float("nan")
    return float(rates_P.std(ddof=1) / np.sqrt(len(rates_P)))


def metric_sources(metrics: Mapping[str, Any]) -> list[str]:
    """Returns the sources that metrics are given for by themselves."""
    prefix = "num_prompts_of_"
    return [name.removeprefix(prefix) for name in metrics if name.startswith(prefix)]


def headline(evaluation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the metrics of the first evaluation set in a result's `evaluation`.

    It is empty if there is none.
    """
    if "pass_at_1" in evaluation:
        return evaluation
    parts = (v for v in evaluation.values() if isinstance(v, Mapping))
    return next((part for part in parts if "pass_at_1" in part), {})
