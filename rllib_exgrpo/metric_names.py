"""The metrics of a result, by their path: unit and meaning, and a check of stop dicts.

A path joins the keys of the nested result dict with slashes, as Tune does:
`env_runners/pass_rate` is `result["env_runners"]["pass_rate"]`.
"""

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from fnmatch import fnmatch
from numbers import Real
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """What a number in the result dict is.

    Attributes:
        unit: "share" is a number from 0 to 1, "flag" 0 or 1, "" a bare number.
        meaning: one line.
    """

    unit: str
    meaning: str


_ENV_RUNNERS = {
    "pass_rate": Metric("share", "correct fresh completions of the step (pass@1)"),
    "reward_mean": Metric("reward", "mean of the fresh completions with a verdict"),
    "episode_return_mean": Metric("reward", "RLlib's name for reward_mean"),
    "episode_len_mean": Metric("env steps", "always 1: a completion is one step"),
    "num_prompts": Metric("prompts", "fresh and replayed prompts of the step"),
    "num_completions": Metric("completions", "sampled in the step"),
    "num_unscored": Metric("completions", "of the step without a verdict"),
    "num_prompts_resampled": Metric("prompts", "in place of ones that teach nothing"),
    "num_tokens_sampled": Metric("tokens", "sampled in the step"),
    "tokens_per_second": Metric("tokens/s", "sampled, over the time of generation"),
    "completion_length_mean": Metric("tokens", "mean length of fresh completions"),
    "completion_length_max": Metric("tokens", "longest fresh completion of the step"),
    "truncated_fraction": Metric("share", "completions that hit the length limit"),
    "zero_advantage_group_fraction": Metric(
        "share", "groups with one reward throughout, which teach nothing"
    ),
    "generate_s": Metric("s", "generation, on the slowest env runner"),
    "verify_s": Metric(
        "s",
        "waiting for verdicts after generation, on the slowest env runner; some "
        "environments verify while others are still sampled",
    ),
    "verifier_latency_p50_s": Metric("s", "median time to verify a completion"),
    "verifier_latency_p99_s": Metric("s", "99th percentile of that time"),
    "verdict_*_fraction": Metric("share", "completions with this verdict"),
    "num_timeouts_*": Metric(
        "completions", "of this source that had no verdict in time, if the step had any"
    ),
    "num_env_steps_sampled": Metric("completions", "sampled in the step"),
    "num_env_steps_sampled_lifetime": Metric("completions", "sampled so far"),
    "num_episodes": Metric("completions", "sampled in the step"),
    "num_episodes_lifetime": Metric("completions", "sampled so far"),
}

_LEARNERS = {
    "policy_loss": Metric("", "mean over the updates of the step, without entropy"),
    "entropy": Metric("nats", "mean token entropy of the trained completions"),
    "num_tokens_trained": Metric("tokens", "in the loss of the step"),
    "importance_ratio_fresh_mean": Metric("ratio", "over fresh tokens"),
    "importance_ratio_replayed_mean": Metric("ratio", "over replayed tokens"),
    "clip_fraction": Metric("share", "fresh tokens whose ratio is clipped"),
    "replayed_saturated_fraction": Metric(
        "share", "replayed tokens with a shaped weight above 0.9"
    ),
    "replayed_effective_sample_fraction": Metric(
        "share", "effective sample size of replayed tokens over their number"
    ),
    "replayed_token_fraction": Metric("share", "trained tokens that are replayed"),
    "replayed_gradient_fraction": Metric(
        "share", "part of replayed tokens in the summed gradient magnitude"
    ),
    "rollout_logp_diff_mean": Metric(
        "nats", "engine against learner, mean over fresh tokens before the first update"
    ),
    "rollout_logp_diff_max": Metric("nats", "the same, largest"),
    "rollout_correction_mean": Metric(
        "ratio", "mean weight of fresh tokens against differences of the engine"
    ),
    "num_tokens_left_out": Metric("tokens", "fresh, outside rollout_correction_range"),
    "num_completions_skipped": Metric(
        "completions", "of the step that needed no pass of the learner"
    ),
    "grad_norm": Metric("", "mean over the updates of the step, before clipping"),
    "grad_norm_max": Metric("", "largest of the step, before clipping"),
    "grad_clip_fraction": Metric("share", "updates whose norm exceeds grad_clip"),
    "num_skipped_updates": Metric("updates", "of the step, skipped for their norm"),
    "learning_rate": Metric("", "of all updates of the step"),
}

_REPLAY = {
    "is_active": Metric("flag", "whether the next step may replay"),
    "num_prompts_replayed": Metric("prompts", "of the step that were replayed"),
    "num_passes": Metric("passes", "over the training prompts begun so far"),
    "prompts": Metric("prompts", "in the replay buffer"),
    "completions": Metric("completions", "in the replay buffer"),
    "tokens": Metric("tokens", "in the replay buffer"),
    "retired": Metric("prompts", "solved by a whole group, drawn no more"),
    "bucket_*": Metric("prompts", "whose latest group had so many correct"),
    "distinct_prompts_replayed": Metric(
        "prompts", "replayed at least once so far; one that left counts again"
    ),
    "age_p50": Metric(
        "versions", "median age of the replayed completions; NaN if there are none"
    ),
    "age_p90": Metric("versions", "the same, 90 % are younger"),
    "code_block_fraction": Metric(
        "share", "replayed completions with code (snowball); NaN if there are none"
    ),
    "chosen_entropy_mean": Metric(
        "nats", "of the replayed completions; NaN unless chosen by entropy"
    ),
    "candidate_entropy_mean": Metric("nats", "the same, of all their candidates"),
}

_TIMERS = {
    "plan_s": Metric("s", "choosing the prompts of the step"),
    "rollout_s": Metric("s", "sampling and verifying"),
    "score_s": Metric("s", "scoring stored completions, within the rollout"),
    "update_s": Metric("s", "updating the weights"),
    "record_s": Metric("s", "recording groups in the replay buffer"),
    "sync_s": Metric("s", "bringing the weights to the env runners"),
}

_EVALUATION_SUMMARY = {
    "pass_at_1": Metric("share", "correct completions of held-out problems (avg@k)"),
    "pass_at_1_stderr": Metric("share", "its standard error over the problems"),
    "pass_at_*": Metric("share", "unbiased chance that one of k samples is correct"),
    "maj_at_*": Metric(
        "share", "right majorities of k samples, if the environment has `answer_key`"
    ),
    "num_prompts": Metric("prompts", "evaluated"),
    "num_completions": Metric("completions", "sampled for it"),
    "samples_per_prompt": Metric("completions", "of each prompt, the largest k"),
    "completion_length_mean": Metric("tokens", "mean length"),
    "truncated_fraction": Metric("share", "completions that hit the length limit"),
    "format_fraction": Metric("share", "completions with an answer to read"),
}

_INTERVALS = {
    f"{name}_at_*_{end}": Metric("share", f"{end}er end of its 95 % bootstrap interval")
    for name in ("pass", "maj")
    for end in ("low", "high")
}

_EVALUATION = {
    # The more special first: the first pattern that fits is taken.
    **{
        f"{name}_of_*": metric._replace(meaning=f"{metric.meaning}; of one data set")
        for name, metric in {**_INTERVALS, **_EVALUATION_SUMMARY}.items()
    },
    **_INTERVALS,
    **_EVALUATION_SUMMARY,
}

_TUNE = {
    "training_iteration": Metric("steps", "training steps so far"),
    "time_total_s": Metric("s", "training time so far, without the start-up"),
    "time_this_iter_s": Metric("s", "time of the step, evaluation included"),
    "num_env_steps_sampled_lifetime": Metric("completions", "sampled so far"),
    "checkpoint_score": Metric(
        "share", "pass@1 of `best_checkpoint_set`; NaN in steps that do not evaluate it"
    ),
}


def _under(prefix: str, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    return {f"{prefix}/{name}": metric for name, metric in metrics.items()}


METRICS: dict[str, Metric] = {
    **_TUNE,
    **_under("env_runners", _ENV_RUNNERS),
    **_under("learners/default_policy", _LEARNERS),
    **_under("replay", _REPLAY),
    **_under("timers", _TIMERS),
    **_under("evaluation", _EVALUATION),
    **_under("evaluation/*", _EVALUATION),
    **_under("evaluation_at_start", _EVALUATION),
    **_under("evaluation_at_start/*", _EVALUATION),
}
"""Metric path to unit and meaning; a `*` stands for any text."""

_OLD_NAMES = {
    "episode_reward_mean": "env_runners/episode_return_mean",
    "episodes_total": "env_runners/num_episodes_lifetime",
    "timesteps_total": "num_env_steps_sampled_lifetime",
    "num_env_steps_sampled": "num_env_steps_sampled_lifetime",
}
"""What older RLlib versions called some of them."""


_COUNTERS = ("training_iteration", "num_env_steps_sampled_lifetime")


def find_metric(path: str) -> Metric | None:
    """Returns the unit and meaning of a metric, None for an unknown path."""
    matches = (m for name, m in METRICS.items() if fnmatch(path, name))
    return next(matches, None)


def value_of(result: Mapping[str, Any], path: str) -> Any:
    """Returns the value at a path of a nested result, None if there is none."""
    value: Any = result
    for key in path.split("/"):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def check_stop(stop: Mapping[str, Any]) -> dict[str, float]:
    """Checks stop criteria: metrics that end a run once they reach a value.

    Args:
        stop: metric to value; nested as in the result dict, or by path.

    Returns:
        Metric path to value.

    Raises:
        ValueError: for an unknown metric, naming the nearest right one, or a value
            that is not a number.
    """
    criteria = dict(_flat(stop))
    for path, value in criteria.items():
        if find_metric(path) is None:
            raise ValueError(
                f"`stop` names {path!r}, which no result has; did you mean "
                f"{nearest_metric(path)!r}?"
            )
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ValueError(
                f"`stop` has {value!r} for {path!r}; give a number: the run ends once "
                "the metric is at least that."
            )
    return criteria


def is_met(stop: Mapping[str, float], result: Mapping[str, Any]) -> bool:
    """Tells whether a result meets any of checked stop criteria."""
    values = ((value_of(result, path), end) for path, end in stop.items())
    return any(value is not None and value >= end for value, end in values)


def nearest_metric(path: str) -> str:
    """Returns the known metric whose path and last part are most like the given."""
    if path in _OLD_NAMES:
        return _OLD_NAMES[path]

    def likeness(name: str) -> float:
        ends = name.rpartition("/")[2], path.rpartition("/")[2]
        return _ratio(name, path) + _ratio(*ends)

    return max(METRICS, key=likeness)


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
