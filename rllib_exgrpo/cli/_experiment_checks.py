"""What `rllib doctor` checks of an experiment on this machine."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rllib_exgrpo import memory
from rllib_exgrpo.cli._checks import Finding, existing_parent
from rllib_exgrpo.exgrpo import ExGRPO
from rllib_exgrpo.exgrpo_config import ExGRPOConfig
from rllib_exgrpo.exgrpo_evaluation import open_prompts
from rllib_exgrpo.policy import build_empty, stop_token_ids
from rllib_exgrpo.text_env import read_prompt

logger = logging.getLogger(__name__)

_NUM_CHECKED = 200  # problems, evenly spread over the environment's
_GIB = 2**30


def all_of(config: ExGRPOConfig, storage: Path) -> Iterator[Finding]:
    """Checks an experiment whose settings are valid.

    Args:
        config: of one trial.
        storage: where results would go.
    """
    prompts = open_prompts(config)
    tokenizer, env = prompts.tokenizer, prompts.env
    all_ids = list(prompts.ids)
    ids = all_ids[:: max(1, len(all_ids) // _NUM_CHECKED)]
    size = memory.ModelSize.of(build_empty(**config._model_config_auto_includes))
    yield processes(config)
    yield from memory_of(config, size, len(all_ids))
    yield disk(config, size, storage)
    yield end_tokens(config, tokenizer, size)
    yield prompt_format(config, tokenizer, env, ids)
    yield round_trip(tokenizer, env, ids)
    yield gold_answers(env, ids)


def processes(config: ExGRPOConfig) -> Finding:
    """Compares processes and GPUs that are asked for with those of this machine."""
    needs = ExGRPO.default_resource_request(config).required_resources
    cpus, gpus = int(needs.get("CPU", 1)), needs.get("GPU", 0)
    cores, cards = os.cpu_count() or 1, torch.cuda.device_count()
    text = f"{cpus} of this run on {cores} cores, {gpus:g} of {cards} GPUs"
    if gpus > cards and "RAY_ADDRESS" not in os.environ:
        return Finding(
            "error",
            "processes",
            f"{text}: the run would not start.",
            "Lower `num_env_runners` and `num_learners` or what they take, or set "
            "RAY_ADDRESS to a cluster.",
        )
    if cpus > cores and "RAY_ADDRESS" not in os.environ:
        return Finding(
            "warning",
            "processes",
            f"{text}: they take turns.",
            "Lower `num_env_runners` or `num_learners` for speed.",
        )
    return Finding("ok", "processes", text)


def warn_of_memory(config: ExGRPOConfig) -> None:
    """Warns, on one machine, of a run that seems too large even with no buffer."""
    if "RAY_ADDRESS" in os.environ:
        return
    size = memory.ModelSize.of(build_empty(**config._model_config_auto_includes))
    for finding in memory_of(config, size, num_prompts=0):
        if finding.level != "ok":
            subject = finding.subject.capitalize()
            logger.warning("%s: %s %s", subject, finding.text, finding.remedy)


def memory_of(
    config: ExGRPOConfig, size: memory.ModelSize, num_prompts: int
) -> Iterator[Finding]:
    """Compares estimates with the memory there is, of the GPUs and of the machine."""
    tokens = config.max_prompt_tokens + config.max_completion_tokens
    learner = memory.learner_bytes(
        size,
        num_learners=config.num_learners,
        zero_stage=config.zero_stage,
        micro_batch_tokens=max(config.max_tokens_per_micro_batch or 0, tokens),
        gradient_checkpointing=config.gradient_checkpointing,
    )
    buffer = memory.buffer_bytes(
        num_prompts,
        config.replay_buffer_config.get(
            "max_completions_per_prompt", config.group_size
        ),
        config.max_completion_tokens,
    )
    host = buffer if "disk_path" not in config.replay_buffer_config else 0.0
    if config.num_gpus_per_learner > 0 and torch.cuda.is_available():
        there = torch.cuda.get_device_properties(0).total_memory
        yield _fits("GPU memory", {"a learner": learner}, there)
    else:
        host += learner * max(config.num_learners, 1)
    parts = {"learners and buffer": host}
    if config.num_gpus_per_env_runner == 0:
        engine = memory.cpu_engine_bytes(size, config.kv_cache_bytes)
        parts["engines"] = engine * max(config.num_env_runners, 1)
    count = 1 + config.num_env_runners + config.num_learners
    parts["processes"] = float(count * memory.PROCESS_BYTES)
    yield _fits("memory", parts, _available_bytes())


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return 1024 * int(kib)


def _fits(subject: str, parts: dict[str, float], there: float) -> Finding:
    needed = sum(parts.values())
    listed = ", ".join(f"{name} {value / _GIB:,.1f}" for name, value in parts.items())
    text = f"about {needed / _GIB:,.1f} of {there / _GIB:,.1f} GiB free ({listed})"
    if needed <= there:
        return Finding("ok", subject, text)
    return Finding(
        "warning",
        subject,
        f"{text}: it may not fit, the estimate is good to a factor of two.",
        "Lower `num_env_runners`, `kv_cache_bytes` or `max_tokens_per_micro_batch`, "
        "set `gradient_checkpointing`, a higher `zero_stage` with more learners, or "
        "the buffer's `disk_path`.",
    )


def disk(config: ExGRPOConfig, size: memory.ModelSize, storage: Path) -> Finding:
    """Compares the size of checkpoints with the free disk."""
    one = memory.checkpoint_bytes(size)
    free = shutil.disk_usage(existing_parent(storage)).free
    text = (
        f"a checkpoint takes about {one / _GIB:,.2f} GiB without the buffer; there is "
        f"room for {free / one:,.0f}"
    )
    if free / one >= 20:
        return Finding("ok", "disk", text)
    return Finding(
        "error" if free < one else "warning",
        "disk",
        f"{text}.",
        "Use --keep-checkpoints N, or another --storage-path.",
    )


def end_tokens(config: ExGRPOConfig, tokenizer: Any, size: memory.ModelSize) -> Finding:
    """Checks that the model can end a completion."""
    stops = stop_token_ids(config.model_name_or_path, tokenizer)
    named = ", ".join(f"{tokenizer.decode([i])!r} ({i})" for i in stops)
    if not stops or max(stops) >= size.words:
        return Finding(
            "error",
            "end tokens",
            f"the model has {named or 'none'}, in a vocabulary of {size.words}: no "
            "completion would end before `max_completion_tokens`.",
            "Set `eos_token` in the model's tokenizer_config.json.",
        )
    clash = tokenizer.pad_token_id in stops
    note = "; one also pads, which does no harm here" if clash else ""
    return Finding("ok", "end tokens", f"{named}{note}")


def prompt_format(
    config: ExGRPOConfig, tokenizer: Any, env: Any, ids: list[Any]
) -> Finding:
    """Shows how a prompt is put to the model."""
    formatter = config.build_prompt_formatter(tokenizer)
    messages, _ = read_prompt(env, ids[0])
    tokens = formatter.token_ids(messages).tolist()
    text = repr(tokenizer.decode(tokens))
    shown = text if len(text) < 200 else f"{text[:100]} ... {text[-90:]}"
    if tokens[1:2] == [tokenizer.bos_token_id]:
        return Finding(
            "warning",
            "prompt",
            f"it begins twice, with {tokenizer.bos_token!r}: {shown}.",
            "Take the token out of the chat template.",
        )
    return Finding("ok", "prompt", shown)


def round_trip(tokenizer: Any, env: Any, ids: list[Any]) -> Finding:
    """Checks that the verifier sees the text that the model wrote."""
    gold = getattr(env.unwrapped, "gold_completion", None)
    if gold is None:
        return Finding("ok", "tokenizer", "no gold completions to try it on")
    problems = [env.unwrapped.problem(i) for i in ids]
    for problem in problems:
        text = gold(problem)
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        again = tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if again != text:
            return Finding(
                "error",
                "tokenizer",
                f"{text!r} comes back as {again!r}: right answers would be marked "
                "wrong.",
                "Use the tokenizer that belongs to the model; check its normaliser.",
            )
    return Finding("ok", "tokenizer", f"{len(ids)} gold completions come back whole")


def gold_answers(env: Any, ids: list[Any]) -> Finding:
    """Checks that the verifier accepts the gold answers."""
    env = env.unwrapped
    if not hasattr(env, "gold_completion"):
        return Finding("ok", "gold answers", "the environment names none")
    problems = [env.problem(i) for i in ids]
    verdicts = env.verify_many([env.gold_completion(p) for p in problems], problems)
    wrong = [
        f"{problem.prompt_id!r} ({verdict.reason})"
        for problem, verdict in zip(problems, verdicts, strict=True)
        if not verdict.reward >= 1.0
    ]
    if not wrong:
        return Finding("ok", "gold answers", f"{len(ids)} of {len(ids)} score 1.0")
    return Finding(
        "warning" if len(wrong) < len(ids) / 20 else "error",
        "gold answers",
        f"{len(wrong)} of {len(ids)} score below 1.0, first {', '.join(wrong[:3])}.",
        "Mend these problems, or the environment's `verify`.",
    )
