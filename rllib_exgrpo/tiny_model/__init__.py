"""A tiny base model that adds numbers, badly: what quick runs and tests start from."""

from pathlib import Path


def path() -> str:
    """Returns the folder of the weights and tokenizer, as `from_pretrained` takes."""
    return str(Path(__file__).parent / "weights")
