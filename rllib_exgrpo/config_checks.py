"""Checks of the settings: which one is wrong, and the remedy. No Ray, no model."""

from collections.abc import Iterator
from itertools import chain, pairwise
from numbers import Real
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A setting with a wrong value; the remedy completes "`knob` is VALUE: ..."."""

    knob: str
    remedy: str


_CHOICES = {
    "loss_aggregation": ("completion_mean", "completion_sum"),
    "retired_prompts": ("drop", "until_pass_ends", "keep"),
    "model_dtype": ("float32", "bfloat16"),
    "prompt_format": ("auto", "chat", "plain"),
    "long_prompts": ("error", "drop"),
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
    "temperature",
    "evaluation_temperature",
)

_DEEPSPEED_KNOBS = {
    "optimizer": "`lr`, `adam_betas`, `adam_eps` and `weight_decay` control",
    "scheduler": "`lr` controls: it takes RLlib's schedules",
    "gradient_clipping": "`grad_clip` controls",
    "train_batch_size": "`prompts_per_update` and `group_size` control",
    "train_micro_batch_size_per_gpu": "`max_tokens_per_micro_batch` controls",
    "gradient_accumulation_steps": "`max_tokens_per_micro_batch` controls",
    "bf16": "`model_dtype` controls",
    "bfloat16": "`model_dtype` controls",
    "fp16": "`model_dtype` controls; float16 is not supported",
    "data_types": "`model_dtype` controls; gradients add up in float32",
    "torch_autocast": "`model_dtype` controls",
}
"""Settings of a DeepSpeed config that knobs of this package decide."""

_POSITIVE = {
    "temperature": "",
    "shaping_beta": ", or None to turn it off",
    "clip_eps": ", or None to turn it off",
    "clip_eps_high": ", or None to turn it off",
    "skip_above_grad_norm": ", or None to turn it off",
}


def setting_faults(config: Any) -> Iterator[Fault]:
    """Yields what is wrong with the settings of an `ExGRPOConfig`, first things first.

    A later check may rest on an earlier one: take the first fault, mend it, ask again.
    """
    return chain(
        _choice_faults(config),
        _count_faults(config),
        _number_faults(config),
        _range_faults(config),
        _learner_faults(config),
        _placement_faults(config),
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
    yield from _lr_faults(config.lr)


def _lr_faults(lr: Any) -> Iterator[Fault]:
    if isinstance(lr, str):
        yield Fault("lr", "give a number (in YAML: 1.0e-5), or RLlib's schedule")
    elif isinstance(lr, int | float):
        if not lr > 0:
            yield Fault("lr", "give a learning rate above 0")
    elif not _is_schedule(lr):
        yield Fault(
            "lr",
            "give a number, or RLlib's schedule: a list of [completions sampled, "
            "learning rate] that starts at 0 completions and rises, such as "
            "[[0, 0.0], [10000, 1e-6]]",
        )


def _is_schedule(lr: Any) -> bool:
    """Tells whether a list of (time, value) is one that RLlib can interpolate."""
    if not isinstance(lr, list | tuple) or len(lr) < 2:
        return False
    points = [tuple(p) if isinstance(p, list | tuple) else () for p in lr]
    if any(
        len(p) != 2 or not all(isinstance(x, int | float) for x in p) for p in points
    ):
        return False
    times = [time for time, _ in points]
    rises = all(a < b for a, b in pairwise(times))
    return times[0] == 0 and rises and all(value >= 0 for _, value in points)


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


def _learner_faults(config: Any) -> Iterator[Fault]:
    if config.zero_stage is None and config.num_learners > 1:
        yield Fault(
            "zero_stage",
            f"`num_learners`={config.num_learners} share one model through DeepSpeed: "
            "give a ZeRO stage from 0 (whole copies) to 3 (everything sharded)",
        )
    if config.deepspeed_config and config.zero_stage is None:
        yield Fault(
            "deepspeed_config",
            "it has no effect without DeepSpeed: give `zero_stage` too, or leave it "
            "empty",
        )
    for key in config.deepspeed_config:
        if key in _DEEPSPEED_KNOBS:
            yield Fault(
                "deepspeed_config",
                f"it sets {key!r}, which {_DEEPSPEED_KNOBS[key]}. Remove {key!r} from "
                "`deepspeed_config`",
            )
    zero = config.deepspeed_config.get("zero_optimization", {})
    if zero.get("stage", config.zero_stage) != config.zero_stage:
        yield Fault(
            "deepspeed_config",
            f"it asks for ZeRO stage {zero['stage']} and `zero_stage` for "
            f"{config.zero_stage}. Set only `zero_stage`",
        )
    yield from _offload_faults(config, zero)


def _offload_faults(config: Any, zero: dict[str, Any]) -> Iterator[Fault]:
    """Yields offloading that DeepSpeed would ignore at this ZeRO stage."""
    for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
        if key in zero and config.zero_stage < least:
            yield Fault(
                "deepspeed_config",
                f"it sets {key!r}, which needs `zero_stage`={least} or more and has "
                f"no effect at {config.zero_stage}",
            )


def _placement_faults(config: Any) -> Iterator[Fault]:
    if config.engine_sleeps and not config.num_gpus_per_env_runner:
        yield Fault(
            "engine_sleeps",
            "only an engine on a GPU can sleep: set `num_gpus_per_env_runner`=1 and "
            "`num_gpus_per_learner`=1, or leave it off",
        )
    if config.engine_sleeps and (config.num_env_runners or config.num_learners):
        yield Fault(
            "engine_sleeps",
            f"engine and learner share a GPU in one process only, but `num_env_runners`"
            f"={config.num_env_runners} and `num_learners`={config.num_learners}: set "
            "both to 0, or leave it off",
        )
