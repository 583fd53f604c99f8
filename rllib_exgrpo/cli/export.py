"""Export the model of a checkpoint for transformers and vLLM.

The folder holds weights (safetensors), tokenizer, configuration, generation
configuration with all end tokens, and a model card. Checkpoints of any number of
learners and any ZeRO stage will do; no GPU and no Ray is needed.
"""

import argparse
import pickle
from pathlib import Path
from typing import Any

from rllib_exgrpo.cli._errors import CommandError, as_command_error
from rllib_exgrpo.cli.evaluate import stored_config

_WEIGHTS = "learner_group/learner/rl_module/default_policy/module_state.pkl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rllib export`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its folder")
    parser.add_argument("folder", metavar="DIR", help="where the model goes")
    parser.add_argument(
        "--merge-lora",
        action="store_true",
        help="of a model trained with LoRA write all weights, with the adapters "
        "merged; without this only the adapters",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what is in DIR"
    )


def run(args: argparse.Namespace) -> int:
    """Runs `rllib export`."""
    from rllib_exgrpo.cli._ray import quieten
    from rllib_exgrpo.model_export import export_model, model_card

    quieten()
    checkpoint, folder = Path(args.checkpoint).resolve(), Path(args.folder).resolve()
    config = stored_config(checkpoint)
    has_lora = config.lora_config is not None
    if args.merge_lora and not has_lora:
        raise CommandError("--merge-lora: the model was trained without LoRA.")
    with as_command_error("the model cannot be exported"):
        export_model(
            _load(checkpoint / _WEIGHTS),
            folder,
            model=config._model_config_auto_includes,
            card=model_card(
                folder.name,
                settings=config.to_dict(),
                changed=_changed_settings(config),
                iterations=_load(checkpoint / "algorithm_state.pkl")[
                    "training_iteration"
                ],
                adapters_only=has_lora and not args.merge_lora,
            ),
            merge_lora=args.merge_lora,
            overwrite=args.overwrite,
        )
    print(f"Written to {args.folder}.")
    return 0


def _load(file: Path) -> Any:
    # RLlib's own format: trust the checkpoint as you would trust its code.
    return pickle.loads(file.read_bytes())


def _changed_settings(config: Any) -> dict[str, Any]:
    defaults = type(config)().to_dict()
    return {
        name: value
        for name, value in config.to_dict().items()
        if name not in defaults or defaults[name] != value
    }
