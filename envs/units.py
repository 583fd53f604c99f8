r"""Splits a quantity into value and unit, and converts between units."""

import re
from dataclasses import dataclass
from typing import Any

_ATOM = r"(?:\\text\{[^{}]*\}|\\currency\{\w+\}|\\degree|\\%)"
_UNIT = rf"{_ATOM}(?:\s*\^\s*(?:\{{\s*-?\d\s*\}}|\d))?"
_TRAILING = re.compile(rf"\s*(?P<unit>{_UNIT}(?:\s*(?:/|\\cdot)?\s*{_UNIT})*)\s*$")
_LEADING = re.compile(r"(?P<sign>[+-]?)\s*\\currency\{(?P<name>\w+)\}\s*")
_WORDS = re.compile(r"\\text|\\currency|[{}\\]")

_SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
# Closed-class English words: a phrase with one of them says more than a unit does.
_FUNCTION_WORDS = re.compile(
    r"\b(?:a|about|above|all|almost|and|approximately|around|at|below|between|but|by"
    r"|each|either|equals|every|except|exactly|fewer|for|from|greater|half|if|is|least"
    r"|less|mod|modulo|more|most|neither|never|no|none|nor|not|only|or|other|over"
    r"|roughly|some|squared|cubed|than|the|to|total|under|unless|until|up|when|where"
    r"|with|without|maximum|minimum|factorial)\b"
)


@dataclass(frozen=True)
class Quantity:
    """A value with its unit.

    Attributes:
        value: LaTeX, scale words such as "million" multiplied in.
        unit: words in lower case, "%" for percent, empty for none.
    """

    value: str
    unit: str = ""


def split_quantity(item: str) -> Quantity | None:
    """Returns value and unit of an item; None if its words are more than a unit."""
    item, unit = item.strip(), ""
    leading = _LEADING.match(item)
    if leading:
        item, unit = leading["sign"] + item[leading.end() :], leading["name"]
    trailing = _TRAILING.search(item)
    if trailing and item[: trailing.start()].strip():
        unit = f"{unit} {_plain(trailing['unit'])}"
        item = item[: trailing.start()].strip()
    if r"\text" in item or r"\currency" in item:
        return None
    words = unit.split()
    if _FUNCTION_WORDS.search(unit):
        return None
    while words and words[0] in _SCALES:
        item = rf"({item})\cdot {_SCALES[words.pop(0)]}"
    return Quantity(item, " ".join(words))


def _plain(unit: str) -> str:
    unit = _WORDS.sub("", unit.replace(r"\%", " % ").replace(r"\degree", " degree "))
    return re.sub(r"\bper ?cent\b", "%", " ".join(unit.lower().split()))


def conversion(unit: str, other: str) -> Any | None:
    """Returns how many `other` one `unit` is, as a SymPy number; None if unrelated.

    Physical units are SymPy's; any other noun is a unit of its own.
    """
    if _singular(unit) == _singular(other):
        return 1
    from sympy.physics import units as u

    base = [u.meter, u.kilogram, u.second, u.ampere, u.kelvin, u.radian]
    given, wanted = (u.convert_to(_expression(text), base) for text in (unit, other))
    ratio = given / wanted
    return None if ratio.free_symbols or ratio.has(u.Quantity) else ratio


def _expression(unit: str) -> Any:
    """Builds a SymPy expression: `square cm`, `miles per hour`, `m/s^2`."""
    import sympy

    product = last = sympy.Integer(1)
    sign, power = 1, 1
    for token in re.findall(r"-?\d|/|[^\s/^\d]+", unit):
        if token in ("/", "per"):
            sign = -1
        elif token in ("square", "sq", "cubic", "cu"):
            power = 2 if token.startswith("s") else 3
        elif token.lstrip("-").isdigit():
            product *= last ** (int(token) - 1)
        else:
            last = _named_unit(token) ** sign
            product *= last**power
            power = 1
    return product


def _named_unit(name: str) -> Any:
    import sympy
    from sympy.physics import units

    for spelling in (name, _singular(name)):
        quantity = getattr(units, spelling, None)
        if isinstance(quantity, units.Quantity):
            return quantity
    return sympy.Symbol(_singular(name))


def _singular(words: str) -> str:
    """Drops plural endings and British spelling."""
    words = re.sub(r"(met|lit)re(?=s?\b)", r"\1er", words)
    words = re.sub(r"\bfeet\b", "foot", re.sub(r"\b(inches|in)\b", "inch", words))
    return re.sub(r"(?<=[a-z]{2})s\b", "", words)
