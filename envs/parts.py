r"""Takes an answer in the dialect of `latex` apart: lists, brackets, relations."""

import re
from collections.abc import Iterator

from .latex import CONNECTIVES, closing, split_top, squeeze

NAME = (
    r"(?:(?:\\[a-zA-Z]+|[a-zA-Z])(?:'|_\{[^{}]*\}|_\w)*(?:\s*\([^()]*\))?"
    r"|\\text\{[^{}]*\})"
)
_NAMED = re.compile(rf"\s*{NAME}\s*")
_MEMBER = re.compile(rf"\s*{NAME}\s*\\in(?![a-z])")
_LABEL_TEXT = re.compile(r"\s*\\text\{[^{}]*:\s*\}")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_CONNECTIVE = re.compile(rf"[,;]|\b(?:{'|'.join(CONNECTIVES)})\b")
_INEQUALITY = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|<|>")
_MATRIX = re.compile(
    r"\s*\\begin\{(?P<kind>[a-z]*matrix|array)\}(?:\{[^{}]*\})?(?P<body>.*)"
    r"\\end\{(?P=kind)\}\s*",
    re.DOTALL,
)


def comma_readings(text: str) -> Iterator[str]:
    """Yields the text with `1,234` as one number, if it has such, and as it stands."""
    merged = _THOUSANDS.sub(
        lambda m: m.group().replace(",", "") if _depth(text, m.start()) == 0 else m[0],
        text,
    )
    yield merged
    if merged != text:
        yield text


def items(text: str) -> list[str]:
    r"""Splits a list at commas, semicolons, "and", "or"; opens a set; expands `\pm`."""
    joined = _TEXT.sub(_split_connectives, text)
    parts = [p.strip() for p in split_top(joined, "[,;]") if p.strip()]
    if len(parts) == 1 and is_set(parts[0]):
        parts = split_top(parts[0].strip()[2:-2], ",")
    elif len(parts) > 1 and re.search(r"\bor\b", text):
        intervals = [interval for part in parts if (interval := as_interval(part))]
        if len(intervals) == len(parts):
            return [r" \cup ".join(intervals)]
    return [sign for part in parts for sign in _plus_minus(part)]


def is_set(text: str) -> bool:
    r"""Whether a text is one `\{...\}`."""
    text = text.strip()
    return text.startswith(r"\{") and closing(text, 0) == len(text) - 1


def brackets(text: str) -> tuple[str, list[str]] | None:
    """Returns the kind of bracket around a text, such as "[)", and its parts."""
    text = text.strip()
    if is_set(text):
        return r"\{\}", split_top(text[2:-2], ",")
    if text[:1] in ("(", "[") and closing(text, 0) == len(text) - 1:
        parts = split_top(text[1:-1], "[,;]")
        if len(parts) > 1 or text[0] == "[":
            return text[0] + text[-1], parts
    return None


def tuple_parts(text: str) -> list[str] | None:
    """Returns the parts of `(a, b)`, or None for anything else."""
    found = brackets(text)
    return found[1] if found and found[0] == "()" else None


def matrix(text: str) -> list[list[str]] | None:
    """Returns the rows of a LaTeX matrix, or None."""
    match = _MATRIX.fullmatch(text)
    if not match:
        return None
    rows = re.split(r"\\\\(?:\[[^\]]*\])?", match["body"])
    return [row.split("&") for row in rows if row.strip()]


def unwrap(text: str) -> str:
    """Takes off what adds nothing: braces, brackets, a leading `=`, `x in`, `Area:`."""
    before = None
    while text != before:
        before = text
        text = _LABEL_TEXT.sub("", _MEMBER.sub("", text, count=1), count=1)
        text = text.strip().removeprefix("=").strip()
        if text[:1] in ("{", "(") and closing(text, 0) == len(text) - 1:
            is_plain = text[0] == "{" or (text[-1] == ")" and not brackets(text))
            text = text[1:-1] if is_plain and text[1:-1].strip() else text
    return text


def name_of(text: str) -> str | None:
    r"""Returns a text that can name a value (`x`, `f(x)`, `\text{Area}`), squeezed."""
    return squeeze(text) if _NAMED.fullmatch(text) else None


def named_value(item: str) -> tuple[str | None, str]:
    """Splits `name = value`; the name is None without one."""
    left, *right = split_top(item, "=")
    name = name_of(left) if right else None
    return (name, "=".join(right)) if name else (None, item)


def split_relation(text: str) -> tuple[list[str], list[str]] | None:
    """Returns the inequality signs of a text and the sides between them."""
    signs = _INEQUALITY.findall(text)
    sides = split_top(text, _INEQUALITY.pattern)
    return (signs, sides) if signs and len(sides) == len(signs) + 1 else None


def ordered_difference(text: str) -> tuple[str, str] | None:
    r"""Returns `l < r` or `r > l` as the sign `<` (or `\le`) and `l - (r)`."""
    relation = split_relation(text)
    if relation is None or len(relation[0]) != 1:
        return None
    (sign,), (left, right) = relation
    if sign in (">", r"\ge"):
        sign, left, right = _FLIPPED[sign], right, left
    return sign, f"{left}-({right})"


def as_interval(text: str) -> str | None:
    r"""Returns `x \ge 2` or `1 < x \le 3` as an interval, `x \ne 2` as a union."""
    unequal = split_top(text, r"\\ne(?![a-z])")
    if len(unequal) == 2 and name_of(unequal[0]):
        return rf"(-\infty,{unequal[1]}) \cup ({unequal[1]},\infty)"
    relation = split_relation(text)
    if relation is None:
        return None
    signs, sides = relation
    if len(signs) == 1 and name_of(sides[1]) and not name_of(sides[0]):
        signs, sides = [_FLIPPED[signs[0]]], sides[::-1]
    if len(signs) == 1 and name_of(sides[0]):
        return _half_line(signs[0], sides[1].strip())
    if len(signs) == 2 and name_of(sides[1]):
        return _between(signs, sides)
    return None


def after_approximation(text: str) -> str:
    r"""Returns the exact side of `a \approx b`."""
    sides = [side.strip() for side in re.split(r"\\approx(?![a-z])", text)]
    return next(filter(None, sides), "")


def words(text: str) -> str:
    """Returns a text as words in lower case, without markup and punctuation."""
    bare = re.sub(r"\\(?:text|currency)|[{}()\[\]\\.,;:!?\"']", " ", text)
    return " ".join(bare.casefold().split())


_FLIPPED = {r"\le": r"\ge", r"\ge": r"\le", "<": ">", ">": "<"}


def _half_line(sign: str, bound: str) -> str:
    if sign in (r"\ge", ">"):
        return ("[" if sign == r"\ge" else "(") + bound + r",\infty)"
    return r"(-\infty," + bound + ("]" if sign == r"\le" else ")")


def _between(signs: list[str], sides: list[str]) -> str | None:
    low, _, high = (side.strip() for side in sides)
    if signs[0] in (r"\ge", ">"):
        signs, low, high = [_FLIPPED[s] for s in reversed(signs)], high, low
    if not set(signs) <= {r"\le", "<"}:
        return None
    left, right = "[" if signs[0] == r"\le" else "(", "]" if signs[1] == r"\le" else ")"
    return f"{left}{low},{high}{right}"


def _split_connectives(match: re.Match[str]) -> str:
    phrases = _CONNECTIVE.split(match[1])
    if len(phrases) == 1:
        return match.group()
    return ",".join(rf"\text{{{p}}}" if p.strip(" ,") else "" for p in phrases)


def _plus_minus(item: str) -> list[str]:
    if not re.search(r"\\(?:pm|mp)(?![a-z])", item):
        return [item]
    upper = re.sub(r"\\pm(?![a-z])", "+", re.sub(r"\\mp(?![a-z])", "-", item))
    lower = re.sub(r"\\pm(?![a-z])", "-", re.sub(r"\\mp(?![a-z])", "+", item))
    return [upper, lower]


def _depth(text: str, position: int) -> int:
    before = text[:position]
    return sum(map(before.count, "([{")) - sum(map(before.count, ")]}"))
