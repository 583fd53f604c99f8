"""Checks of the settings: which one is wrong, and the remedy. No Ray, no model."""

from collections.abc import Iterator
from itertools import chain
from numbers import Real
from typing import Any

from rllib_exgrpo.learner_checks import Fault, learner_faults
from rllib_exgrpo.prompt_format import NAMED_FORMATS

_CHOICES = {
    "loss_aggregation": (
        "completion_mean",
        "completion_sum",
        "token_mean",
        "sequence_mean",
    ),
    "behavior_logp_source": ("engine", "learner"),
    "rollout_correction_level": ("token", "sequence"),
    "retired_prompts": ("drop", "until_pass_ends", "keep"),
    "model_dtype": ("float32", "bfloat16"),
    "prompt_format": ("auto", "chat", "plain", *NAMED_FORMATS),
    "long_prompts": ("error", "drop", "truncate_left"),
    "special_token_text": ("split", "keep", "drop", "error"),
    "prompt_overlap": ("warn", "error", "ignore"),
    "weight_transfer": ("object_store", "nccl", "ipc"),
    "zero_stage": (None, 0, 1, 2, 3),
}

_COUNTS = (
    "prompts_per_step",
    "prompts_per_update",
    "group_size",
    "max_prompt_tokens",
    "max_completion_tokens",
    "evaluation_samples_per_prompt",
)
_OPTIONAL_COUNTS = ("evaluation_max_prompts", "max_tokens_per_micro_batch")

_NUMBERS = (
    "replay_ratio",
    "replay_start_pass_rate",
    "success_threshold",
    "shaping_beta",
    "clip_eps",
    "clip_eps_high",
    "entropy_coeff",
    "adam_eps",
    "weight_decay",
    "grad_clip",
    "skip_above_grad_norm",
    "rollout_correction_cap",
    "max_rollout_logp_diff",
    "temperature",
    "evaluation_temperature",
)

_POSITIVE = {
    "temperature": "",
    "shaping_beta": ", or None to turn it off",
    "clip_eps": ", or None to turn it off",
    "clip_eps_high": ", or None to turn it off",
    "skip_above_grad_norm": ", or None to turn it off",
    "rollout_correction_cap": ", or None to turn it off",
    "max_rollout_logp_diff": ", or None to turn it off",
}

_FULL_DISTRIBUTION = (
    "completions are drawn from the model's full distribution, because the learner's "
    "log-probs are those of the full distribution; remove it"
)
_ENGINE_SETTINGS = {
    "model": "`model_name_or_path` sets it",
    "dtype": "`model_dtype` sets it",
    "trust_remote_code": "`trust_remote_code` of `language_model()` sets it",
    "hf_overrides": "`model_config_overrides` sets it",
    "max_model_len": "`max_prompt_tokens` and `max_completion_tokens` set it",
    "weight_transfer_config": "`weight_transfer` sets it",
    "seed": "`debugging(seed=...)` sets it, and each call has a seed of its own",
    "disable_log_stats": "`env_runners/tokens_per_second` tells the speed",
    "logprobs_mode": "the learner needs the log-probs of the sampling distribution",
    **dict.fromkeys(
        (
            "generation_config",
            "override_generation_config",
            "logits_processors",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ),
        _FULL_DISTRIBUTION,
    ),
    "temperature": "`temperature` of `engine()` sets it",
}
"""What `engine_kwargs` may not hold, of `vllm.LLM` and of sampling, and why."""


def setting_faults(config: Any) -> Iterator[Fault]:
    """Yields what is wrong with the settings of an `ExGRPOConfig`, first things first.

    A later check may rest on an earlier one: take the first fault, mend it, ask again.
    """
    return chain(
        _choice_faults(config),
        _count_faults(config),
        _number_faults(config),
        _range_faults(config),
        learner_faults(config),
        _engine_faults(config),
        _correction_faults(config),
    )


def _choice_faults(config: Any) -> Iterator[Fault]:
    for knob, choices in _CHOICES.items():
        if getattr(config, knob) not in choices:
            yield Fault(knob, f"take one of {', '.join(map(repr, choices))}")


def _count_faults(config: Any) -> Iterator[Fault]:
    for knob in _COUNTS:
        if not _is_count(getattr(config, knob)):
            yield Fault(knob, "give a whole number of at least 1")
    for knob in _OPTIONAL_COUNTS:
        value = getattr(config, knob)
        if value is not None and not _is_count(value):
            yield Fault(knob, "give a whole number of at least 1, or None")
    if not _is_count(config.max_resampled_prompts + 1):
        yield Fault("max_resampled_prompts", "give a whole number of at least 0")
    if config.group_size < 2:
        yield Fault(
            "group_size",
            "advantages compare the completions of one prompt, so a group needs at "
            "least 2; the paper uses 8",
        )
    step, update = config.prompts_per_step, config.prompts_per_update
    if step % update:
        low = step // update * update
        fits = " or ".join(str(n) for n in (low, low + update) if n)
        yield Fault(
            "prompts_per_step",
            f"it must be a multiple of `prompts_per_update`={update} (both count "
            f"prompts): {fits} would do",
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _number_faults(config: Any) -> Iterator[Fault]:
    for knob in _NUMBERS:
        value = getattr(config, knob)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not is_number:
            yield Fault(knob, "give a number, without quotes")


def _range_faults(config: Any) -> Iterator[Fault]:
    for knob, hint in _POSITIVE.items():
        value = getattr(config, knob)
        if value is not None and not value > 0:
            yield Fault(knob, f"give a number above 0{hint}")
    if not 0 <= config.replay_ratio <= 1:
        yield Fault(
            "replay_ratio",
            "it is a share of the prompts of a step: give a number from 0 (no replay) "
            "to 1; the paper uses 0.5",
        )
    rate = config.replay_start_pass_rate
    if rate is not None and not 0 <= rate < 1:
        yield Fault(
            "replay_start_pass_rate",
            "give a pass rate from 0 up to but not including 1, or None to start at "
            "once",
        )
    if not 0 < config.success_threshold <= 1:
        yield Fault("success_threshold", "give a reward above 0 and at most 1")
    if config.evaluation_temperature < 0:
        yield Fault("evaluation_temperature", "give 0 (greedy) or more")
    if "{prompt}" not in config.plain_template:
        yield Fault("plain_template", "it needs the placeholder {prompt}")


def _engine_faults(config: Any) -> Iterator[Fault]:
    for name, reason in _ENGINE_SETTINGS.items():
        if name in config.engine_kwargs:
            yield Fault("engine_kwargs", f"it may not hold {name!r}: {reason}")


def _correction_faults(config: Any) -> Iterator[Fault]:
    bounds = config.rollout_correction_range
    if bounds is not None and not (len(bounds) == 2 and 0 <= bounds[0] < 1 < bounds[1]):
        yield Fault(
            "rollout_correction_range",
            "give (low, high) with 0 <= low < 1 < high, for example (0.5, 2.0), or "
            "None to turn it off",
        )
    for knob in ("rollout_correction_cap", "rollout_correction_range"):
        if (
            getattr(config, knob) is not None
            and config.behavior_logp_source == "engine"
        ):
            yield Fault(
                knob,
                "it compares the engine's log-probs with the learner's, which "
                "`behavior_logp_source`='learner' computes; set that too",
            )
