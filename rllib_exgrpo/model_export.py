"""Writes trained weights as a Hugging Face model: what transformers and vLLM load."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rllib_exgrpo import lora
from rllib_exgrpo.policy import (
    build_empty,
    load_tokenizer,
    resolve_model,
    stop_token_ids,
)

_PACKAGES = ("rllib_exgrpo", "ray", "torch", "transformers", "deepspeed", "peft")

_CARD = """\
---
base_model: {base_model}
library_name: transformers
tags: [rllib, exgrpo, reinforcement-learning]
---

# {name}

{base_model}, trained for {iterations} steps with
[ExGRPO](https://arxiv.org/abs/2510.02245) on RLlib (rllib_exgrpo).{adapters}

It was sampled at temperature {temperature:g} with the full distribution (no top-p, no
top-k), with {prompt_tokens} prompt tokens and {completion_tokens} completion tokens at
most.

## Settings that differ from the defaults

```json
{settings}
```

## Versions

{versions}
"""


def export_model(
    weights: Mapping[str, Tensor],
    folder: str | Path,
    *,
    model: Mapping[str, Any],
    card: str,
    merge_lora: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes a folder with weights (safetensors), tokenizer, configs and model card.

    It is complete or absent: it is written under another name first.

    Args:
        weights: of a checkpoint: float32, LoRA adapters beside the model's weights.
        folder: where to.
        model: the arguments of `LanguagePolicy.from_pretrained` in training.
        card: text of the model card.
        merge_lora: of a model with LoRA adapters write all weights, merged; otherwise
            only the adapters.
        overwrite: replace what is in the folder.

    Raises:
        FileExistsError: if there is something in the folder and `overwrite` is off.
    """
    name = model["name_or_path"]
    tokenizer = load_tokenizer(name, trust_remote_code=model["trust_remote_code"])
    with written_at_once(Path(folder), overwrite) as part:
        adapters = None if merge_lora else model["lora_config"]
        if adapters is None:
            _save_whole(weights, part, model)
        else:
            lora.save_adapters(
                build_empty(**{**model, "lora_config": None}),
                weights,
                adapters,
                base_model=base_model(name),
                folder=part,
            )
        tokenizer.save_pretrained(part)
        _save_generation_config(name, tokenizer, part)
        (part / "README.md").write_text(card)


def _save_whole(
    weights: Mapping[str, Tensor], folder: Path, model: Mapping[str, Any]
) -> None:
    dtype = getattr(torch, model["dtype"])
    merged = {
        name: lora.merged(tensor.detach(), layer)
        for name, tensor, layer in lora.own_parameters(_load(weights, model))
    }
    plain = _load(
        {n: t.to(dtype) if t.is_floating_point() else t for n, t in merged.items()},
        {**model, "lora_config": None},
    )
    plain.save_pretrained(folder)


def _load(weights: Mapping[str, Tensor], model: Mapping[str, Any]) -> Any:
    """Builds the model around the weights, without drawing or copying any."""
    built = build_empty(**model)
    built.load_state_dict(weights, assign=True)
    built.tie_weights()  # otherwise they would be saved twice
    return built


def _save_generation_config(name: str, tokenizer: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(resolve_model(name))
    except OSError:  # the file is optional
        config = GenerationConfig()
    config.eos_token_id = stop_token_ids(name, tokenizer)
    config.to_json_file(folder / "generation_config.json")


@contextmanager
def written_at_once(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Yields a folder to write to, which then takes the place of `folder`.

    Raises:
        FileExistsError: if there is something in `folder` and `overwrite` is off.
    """
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise FileExistsError(
            f"{folder} is not empty. Give another folder, or --overwrite to replace "
            "what is in it."
        )
    part, old = (folder.with_name(f".{folder.name}.{end}") for end in ("part", "old"))
    for left_over in (part, old):
        shutil.rmtree(left_over, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    if folder.exists():
        os.rename(folder, old)
    os.rename(part, folder)
    shutil.rmtree(old, ignore_errors=True)


def base_model(name_or_path: str) -> str:
    """Returns what to call the base model: of a folder its name, without the path."""
    return Path(name_or_path).name if Path(name_or_path).is_dir() else name_or_path


def model_card(
    name: str,
    *,
    settings: Mapping[str, Any],
    changed: Mapping[str, Any],
    iterations: int,
    adapters_only: bool,
) -> str:
    """Returns the text of a model card.

    Args:
        name: of the model.
        settings: all settings of the run.
        changed: those that differ from the defaults.
        iterations: training steps.
        adapters_only: whether the folder holds LoRA adapters without the base model.
    """
    versions = {p: _version(p) for p in _PACKAGES}
    return _CARD.format(
        name=name,
        base_model=base_model(settings["model_name_or_path"]),
        adapters=" The folder holds LoRA adapters." if adapters_only else "",
        iterations=iterations,
        temperature=settings["temperature"],
        prompt_tokens=settings["max_prompt_tokens"],
        completion_tokens=settings["max_completion_tokens"],
        settings=json.dumps(_readable(changed), indent=2, sort_keys=True),
        versions="\n".join(f"- {p} {v}" for p, v in versions.items() if v),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _readable(value: Any) -> Any:
    """Makes a setting JSON; a path becomes its last part, a class its name."""
    if isinstance(value, Mapping):
        return {str(key): _readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_readable(item) for item in value]
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, os.PathLike) or (
        isinstance(value, str) and value.startswith(("/", "~", "."))
    ):
        return Path(value).name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__qualname__
