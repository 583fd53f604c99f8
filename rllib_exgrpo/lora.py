"""Low-rank adapters (LoRA) by peft: trained instead of the model's own weights.

peft puts them into the model in place: a layer `q_proj` with the weight `q_proj.weight`
becomes one with `q_proj.base_layer.weight` and adapters. This module is the only one
that knows these names. The engine is given merged weights, under the model's own names.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_REFUSED = {
    "lora_dropout": "the engine samples without dropout",
    "use_dora": "its weights are not a sum of the model's and the adapters'",
    "modules_to_save": "only adapters are trained",
}
"""Settings of `peft.LoraConfig` that the learner does not support, and why."""


def build_lora_config(settings: Mapping[str, Any]) -> Any:
    """Builds peft's configuration.

    Args:
        settings: arguments of `peft.LoraConfig`.

    Raises:
        ImportError: if peft is not installed, naming the extra to install.
        ValueError: for a setting that peft does not have or the learner not support.
    """
    peft = _import_peft()
    for name, reason in _REFUSED.items():
        if settings.get(name):
            raise ValueError(
                f"`lora_config` sets {name!r}={settings[name]!r}, but {reason}. "
                f"Remove {name!r} from `lora_config`."
            )
    try:
        return peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    except TypeError as error:  # an argument that LoraConfig does not have
        raise ValueError(
            f"`lora_config` is {dict(settings)!r}: {error}. Take the arguments of "
            "`peft.LoraConfig`, such as {'r': 16, 'lora_alpha': 32, "
            "'target_modules': 'all-linear'}."
        ) from error


def add_adapters(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Puts adapters into a model and freezes everything else; it acts as before."""
    _import_peft().inject_adapter_in_model(build_lora_config(settings), model)


def own_parameters(
    model: nn.Module,
) -> Iterator[tuple[str, Tensor, nn.Module | None]]:
    """Yields what the model has without its adapters.

    Yields:
        The name without adapters; the parameter or buffer; the layer whose
        `get_delta_weight("default")` the adapters add to it, None for the others.
    """
    adapted = {
        f"{name}.": module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    for name, tensor in model.state_dict(keep_vars=True).items():
        layer, separator, part = name.partition("base_layer.")
        if separator:
            yield layer + part, tensor, adapted[layer] if part == "weight" else None
        elif not name.startswith(tuple(adapted)):
            yield name, tensor, None


def merged(weight: Tensor, layer: Any) -> Tensor:
    """Returns a weight with what its adapters add, computed in float32.

    Args:
        weight: of the layer.
        layer: as `own_parameters` yields it; None returns the weight as it is.
    """
    if layer is None:
        return weight
    return weight.float() + layer.get_delta_weight("default").detach().float()


def save_adapters(
    model: Any,
    weights: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    *,
    base_model: str,
    folder: Path,
) -> None:
    """Saves adapters as peft does.

    Args:
        model: without adapters and weights.
        weights: of the model with adapters.
        settings: that the adapters were built with.
        base_model: the name that the adapters' config gives the model.
        folder: where to.
    """
    config = build_lora_config(settings)
    adapted = _import_peft().get_peft_model(model, config)
    model.load_state_dict(weights, assign=True)
    config.base_model_name_or_path = base_model
    adapted.save_pretrained(folder, save_embedding_layers=False)


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError(
            "`lora_config` needs peft, which is not installed. Install this package "
            "with the extra: `pip install 'rllib_exgrpo[lora]'`, or leave "
            "`lora_config` at None to train all weights."
        ) from error
    return peft
