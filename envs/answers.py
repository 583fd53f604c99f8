r"""Finds the answer that a completion marks as its own: the last `\boxed{...}`."""

import re
from itertools import pairwise

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_JOINT = re.compile(
    r"(?:[\s$,;]|\\[()\[\],;]|\b(?:and|or)\b|\\text\{\s*(?:and|or)\s*\})*"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Returns what the last `\boxed{...}` (or `\fbox{...}`) holds.

    There is no falling back to an earlier box: a last box that is never closed means
    that the completion was cut off, and gives None, as does a text without a box.
    Escaped braces (`\{`) do not count in the balance.

    Boxes with nothing but a comma, "or" or "and" between them are one list of answers:
    naming several answers must not pass for the last of them.
    """
    starts = list(_BOX.finditer(text))
    if not starts:
        return None
    answers = [_balanced_prefix(text, starts[-1].end())]
    for box, following in reversed(list(pairwise(starts))):
        content = _balanced_prefix(text[: following.start()], box.end())
        if content is None or answers[0] is None:
            break
        between = text[box.end() + len(content) + 1 : following.start()]
        if not _JOINT.fullmatch(between):
            break
        answers.insert(0, content)
    distinct = dict.fromkeys(answers)
    return ", ".join(a for a in distinct if a) if len(distinct) > 1 else answers[0]


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
