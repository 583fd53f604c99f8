"""Turns a GGUF file into a model folder: `python -m rllib_exgrpo.gguf FILE DIR`.

Quantised weights are written out in float32: the engine and the learner take plain
checkpoints only. Needs the extra `gguf`.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(file: Path, folder: Path) -> None:
    """Writes a GGUF file's model and tokenizer as `language_model` takes them.

    Args:
        file: a causal language model of an architecture that transformers reads.
        folder: where to write; made if it does not exist.
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
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("folder", metavar="DIR", type=Path)
    args = parser.parse_args()
    convert(args.file, args.folder)


if __name__ == "__main__":
    main()
