"""Prompt ids as text, whatever their type, for files that other tools can read."""

import base64
import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

import pyarrow as pa

from rllib_exgrpo.records import PromptId


def encode_id(prompt_id: PromptId) -> str:
    """Returns a prompt id as JSON; equal ids of one type give equal text.

    A number, string, boolean or None is itself. A tuple, frozenset or bytes object is
    an object with the type's name: `{"tuple": [1, "a"]}`, bytes in base64.

    Raises:
        TypeError: if the id, or a part of it, is of another type.
    """
    if type(prompt_id) is int:
        return str(prompt_id)
    if type(prompt_id) is str:
        return encode_basestring_ascii(prompt_id)
    return json.dumps(_to_json(prompt_id))


def encode_ids(prompt_ids: Sequence[PromptId]) -> pa.Array:
    """Returns `encode_id` of each; plain numbers, of which there are most, at once."""
    try:
        numbers = pa.array(prompt_ids)
    except (pa.ArrowException, OverflowError):  # of types that do not go together
        numbers = None
    if numbers is None or numbers.type != pa.int64() or numbers.null_count:
        return pa.array(map(encode_id, prompt_ids), pa.string())
    return numbers.cast(pa.string())


def decode_id(text: str) -> PromptId:
    """Returns the prompt id that `encode_id` turned into `text`.

    Raises:
        ValueError: if the text is not of that form.
    """
    return _decode(text)


def _to_json(part: Any) -> Any:
    if hasattr(part, "item") and hasattr(part, "dtype"):
        part = part.item()  # a numpy scalar equals its Python twin, and hashes alike
    if part is None or isinstance(part, (bool, int, float, str)):
        return part
    if isinstance(part, bytes):
        return {"bytes": base64.b64encode(part).decode("ascii")}
    if isinstance(part, tuple):
        return {"tuple": [_to_json(p) for p in part]}
    if isinstance(part, frozenset):
        return {"frozenset": sorted((_to_json(p) for p in part), key=json.dumps)}
    raise TypeError(
        f"The prompt id {part!r} is of type {type(part).__name__}, which cannot be "
        "written to a file: let the environment use ints, strings, bytes or tuples."
    )


def _from_json(part: dict[str, Any]) -> PromptId:
    ((name, value),) = part.items()
    if name == "bytes":
        return base64.b64decode(value)
    return {"tuple": tuple, "frozenset": frozenset}[name](value)


_decode = json.JSONDecoder(object_hook=_from_json).decode
