"""Checks of the settings of learners: optimiser, DeepSpeed, placement."""

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A setting with a wrong value; the remedy completes "`knob` is VALUE: ..."."""

    knob: str
    remedy: str


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


def learner_faults(config: Any) -> Iterator[Fault]:
    """Yields what is wrong with the settings of learners and their placement."""
    return chain(
        _lr_faults(config.lr),
        _deepspeed_faults(config),
        _placement_faults(config),
        _transfer_faults(config),
    )


def _deepspeed_faults(config: Any) -> Iterator[Fault]:
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
    if config.use_liger_kernel and not config.num_gpus_per_learner:
        yield Fault(
            "use_liger_kernel",
            "Liger's kernels run on GPUs only: set `num_gpus_per_learner`, or turn it "
            "off",
        )
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


def _transfer_faults(config: Any) -> Iterator[Fault]:
    if config.weight_transfer == "object_store":
        return
    for knob in ("num_env_runners", "num_learners"):
        if not getattr(config, knob):
            yield Fault(
                "weight_transfer",
                f"it connects processes, but `{knob}` is 0: set it to 1 or more, or "
                "take 'object_store'",
            )
    if not (config.num_gpus_per_env_runner and config.num_gpus_per_learner):
        yield Fault(
            "weight_transfer",
            "it needs GPUs: set `num_gpus_per_env_runner` and `num_gpus_per_learner`, "
            "or take 'object_store'",
        )


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
