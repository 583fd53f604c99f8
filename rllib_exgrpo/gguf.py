"""Turns a GGUF file into a model folder: `python -m rllib_exgrpo.gguf FILE DIR`.

Quantised weights are written out in float32: the engine and the learner take plain
checkpoints only. Needs the extra `gguf`.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from rllib_exgrpo.model_export import written_at_once


def convert(file: Path, folder: Path, *, overwrite: bool = False) -> None:
    """Writes a GGUF file's model and tokenizer as `language_model` takes them.

    The folder is complete or absent.

    Args:
        file: a causal language model of an architecture that transformers reads.
        folder: where to write; made if it does not exist.
        overwrite: replace what is in the folder.

    Raises:
        FileExistsError: if there is something in the folder and `overwrite` is off.
    """
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    # A model that was read from a GGUF file refuses to be saved; one made from the same
    # configuration without the mark of its origin does not.
    config = type(quantized.config)(
        **{
            name: value
            for name, value in quantized.config.to_dict().items()
            if name not in ("quantization_config", "_name_or_path")
        }
    )
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    model.load_state_dict(quantized.state_dict())
    with written_at_once(folder, overwrite) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what is in DIR"
    )
    args = parser.parse_args()
    convert(args.file, args.folder, overwrite=args.overwrite)


if __name__ == "__main__":
    main()
