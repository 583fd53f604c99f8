"""Metrics of the rollouts of a training step, from groups. Pure numpy."""

from collections import Counter
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
        rounds: what the env runners returned in each round of sampling, for timings;
            the rounds after the first sampled prompts anew.
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
        **_verifier_latency(groups),
        **_reason_fractions(groups),
        **_timeouts_by_source(groups),
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


def _reason_fractions(groups: Sequence[Group]) -> dict[str, float]:
    counts = Counter(reason for group in groups for reason in group.reasons)
    total = max(counts.total(), 1)
    return {
        f"verdict_{reason}_fraction": counts[reason] / total
        for reason in sorted({*_REASONS, *counts})
    }


def _verifier_latency(groups: Sequence[Group]) -> dict[str, float]:
    seconds = [s for group in groups for s in group.verify_seconds] or [0.0]
    p50, p99 = np.quantile(seconds, [0.5, 0.99], method="higher")
    return {"verifier_latency_p50_s": float(p50), "verifier_latency_p99_s": float(p99)}


def _timeouts_by_source(groups: Sequence[Group]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for group in groups:
        if group.source:
            counts[group.source] += group.reasons.count("timeout")
    return {f"num_timeouts_{name}": float(count) for name, count in counts.items()}
