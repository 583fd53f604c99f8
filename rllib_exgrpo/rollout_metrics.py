"""Metrics of rollouts and evaluations, from groups. Pure numpy."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from rllib_exgrpo.records import Group, RolloutResult


def pass_rate(groups: Sequence[Group], success_threshold: float) -> float:
    """Computes pass@1: the share of correct fresh completions, replayed ones left out.

    A completion without a verdict counts as not correct.
    """
    rewards = [c.reward for group in groups for c in group.completions]
    return float(np.mean(np.array(rewards) >= success_threshold))


def rollout_metrics(
    groups: Sequence[Group],
    rounds: Sequence[Sequence[RolloutResult]],
    *,
    success_threshold: float,
) -> dict[str, float]:
    """Summarises the fresh completions of a training step.

    Args:
        groups: all groups of the step.
        rounds: what the env runners returned in each round of sampling, for timings and
            verifier reasons; the rounds after the first sampled prompts anew.
        success_threshold: smallest reward that counts as correct.

    Returns:
        Metric name to value.
    """
    fresh = [c for group in groups for c in group.completions]
    rewards = np.array([c.reward for c in fresh])
    lengths = np.array([len(c) for c in fresh])
    spreads = [np.ptp(np.nan_to_num(group.rewards_G)) for group in groups]
    generate_s = sum(_slowest(results, "generate") for results in rounds)
    verify_s = sum(_slowest(results, "verify") for results in rounds)
    return {
        "pass_rate": pass_rate(groups, success_threshold),
        "reward_mean": float(np.nanmean(rewards)) if len(rewards) else float("nan"),
        "num_prompts": float(len(groups)),
        "num_prompts_resampled": float(
            sum(len(r.groups) for results in rounds[1:] for r in results)
        ),
        "num_completions": float(len(fresh)),
        "num_unscored": float(np.isnan(rewards).sum()),
        "num_tokens_sampled": float(lengths.sum()),
        "tokens_per_second": float(lengths.sum()) / generate_s if generate_s else 0.0,
        "completion_length_mean": float(lengths.mean()),
        "completion_length_max": float(lengths.max()),
        "truncated_fraction": float(np.mean([c.truncated for c in fresh])),
        "zero_advantage_group_fraction": float(np.mean(np.array(spreads) == 0)),
        "generate_s": generate_s,
        "verify_s": verify_s,
        **_reason_fractions([r for results in rounds for r in results]),
    }


def _slowest(results: Sequence[RolloutResult], part: str) -> float:
    """Runners work side by side: the slowest one sets the pace."""
    return max([result.seconds.get(part, 0.0) for result in results] + [0.0])


_REASONS = (
    "ok",
    "wrong",
    "no_answer",
    "gold_unparsed",
    "answer_unparsed",
    "timeout",
)


def _reason_fractions(results: Sequence[RolloutResult]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result.reasons)
    total = max(sum(counts.values()), 1)
    return {
        f"verdict_{reason}_fraction": counts[reason] / total
        for reason in sorted({*_REASONS, *counts})
    }


def evaluation_metrics(
    groups: Sequence[Group], *, success_threshold: float
) -> dict[str, float]:
    """Summarises an evaluation: pass@1 estimated from all samples of each prompt.

    Args:
        groups: one a prompt, with equally many completions each.
        success_threshold: smallest reward that counts as correct.

    Returns:
        Metric name to value; `pass_at_1/SOURCE` for each data set if there are several.
    """
    rates_P = np.array(
        [
            np.mean([c.reward >= success_threshold for c in group.completions])
            for group in groups
        ]
    )
    completions = [c for group in groups for c in group.completions]
    metrics = {
        "pass_at_1": float(rates_P.mean()),
        "pass_at_1_stderr": _standard_error(rates_P),
        "num_prompts": float(len(groups)),
        "num_completions": float(len(completions)),
        "completion_length_mean": float(np.mean([len(c) for c in completions])),
        "truncated_fraction": float(np.mean([c.truncated for c in completions])),
    }
    by_source: dict[str, list[float]] = defaultdict(list)
    for group, rate in zip(groups, rates_P, strict=True):
        by_source[group.source].append(rate)
    if len(by_source) > 1:
        for source, rates in sorted(by_source.items()):
            metrics[f"pass_at_1_of_{source}"] = float(np.mean(rates))
    return metrics


def _standard_error(rates_P: np.ndarray) -> float:
    """Standard error of the mean over prompts, each prompt one observation."""
    if len(rates_P) < 2:
        return float("nan")
    return float(rates_P.std(ddof=1) / np.sqrt(len(rates_P)))
