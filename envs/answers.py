r"""Finds the answer that a completion marks as its own: the last `\boxed{...}`."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Returns what the last `\boxed{...}` (or `\fbox{...}`) holds.

    There is no falling back to an earlier box: a last box that is never closed means
    that the completion was cut off, and gives None, as does a text without a box.
    Escaped braces (`\{`) do not count in the balance.
    """
    ends = [match.end() for match in _BOX.finditer(text)]
    return _balanced_prefix(text, ends[-1]) if ends else None


def boxed_answer(completion: str) -> str | None:
    r"""Returns the last box outside the thinking part of a completion.

    What stands before the last `</think>` is a draft. A `<think>` that is never closed
    means that no final answer was given. Templates that open the thinking part in the
    prompt leave only the closing tag in the completion, which is handled as well.
    """
    *_, final = completion.rpartition("</think>")
    return None if "<think>" in final else last_boxed(final)


def _balanced_prefix(text: str, start: int) -> str | None:
    """Returns `text[start:]` up to the brace that closes one opened before it."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[start : match.start()]
    return None
