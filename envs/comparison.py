r"""Compares two answers in the dialect of `latex`, part by part.

An answer is a list of items; an item is a set, tuple, interval, matrix, relation,
quantity, word or formula. Only formulas that are not plain numbers need SymPy.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from . import symbolic
from .exact import TooLargeError, decimal_places, evaluate, is_terminating
from .latex import split_top, squeeze
from .parts import (
    after_approximation,
    as_interval,
    brackets,
    comma_readings,
    is_set,
    items,
    matrix,
    name_of,
    named_value,
    ordered_difference,
    split_relation,
    tuple_parts,
    unwrap,
    words,
)
from .symbolic import UnparsedError
from .units import Quantity, conversion, split_quantity
from .verdict import Reason

MIN_ROUNDED_DIGITS = 6
"""Significant digits from which a decimal may stand for a value that never ends."""

_MAX_ITEMS = 200

_GIVEN_LABEL = re.compile(r"(?:\\text\{)?\s*\(?([A-Z])\)?\s*\}?")
_CHOSEN_LABEL = re.compile(
    r"(?:\\text\{)?\s*(?:(?:option|choice|answer)\s+)?\(?([A-Za-z])"
    r"(?:[).:]*\s*\}?|[).:]+[\s}\\].*)",
    re.IGNORECASE | re.DOTALL,
)
_SET_ALGEBRA = re.compile(r"\\(?:cup|cap|setminus|mathbb)(?![a-z])")
_BASED = re.compile(r"(\d[\dA-Z]*)\s*_\s*\{?\s*(\d+)\s*\}?")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")


class NeedsSymbolicError(Exception):
    """The comparison needs SymPy, which the caller did not allow."""


class UnusableError(ValueError):
    """One of the two answers has a part that is no formula.

    Attributes:
        reason: whether it is the gold answer or the completion's.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Comparison:
    """Compares a gold answer with a completion's, both already normalised.

    Attributes:
        symbolic: whether SymPy may be used, which is unbounded in time.
    """

    symbolic: bool

    def same(self, gold: str, answer: str) -> bool:
        """Tells whether the answers agree in any reading of their commas.

        Raises:
            UnusableError: if no reading agrees and a part is no formula.
            NeedsSymbolicError: if only SymPy can tell and it is not allowed.
        """
        if squeeze(gold) == squeeze(answer):
            return True
        label = _GIVEN_LABEL.fullmatch(gold)
        if label:
            return self._same_label(label, answer)
        unusable: UnusableError | None = None
        for wanted in comma_readings(gold):
            for given in comma_readings(answer):
                try:
                    if self._same_list(wanted, given):
                        return True
                except UnusableError as error:
                    unusable = error
        if unusable:
            raise unusable
        return False

    def _same_label(self, gold: re.Match[str], answer: str) -> bool:
        chosen = _CHOSEN_LABEL.fullmatch(answer)
        is_marked = len(gold.group()) > 1
        given = chosen[1] if chosen else ""
        return gold[1] == (given.upper() if is_marked else given)

    def _same_list(self, gold: str, answer: str) -> bool:
        wanted, given = items(gold), items(answer)
        if len(wanted) > 1 and len(given) == 1 and not is_set(gold):
            given = tuple_parts(given[0]) or given
            return self._match(wanted, given, ordered=True)
        if len(given) > 1 and len(wanted) == 1 and not is_set(answer):
            wanted = tuple_parts(wanted[0]) or wanted
            return self._match(wanted, given, ordered=True)
        return self._match(wanted, given, ordered=_tells_apart(wanted, given))

    def _match(self, wanted: list[str], given: list[str], *, ordered: bool) -> bool:
        """Pairs the items off, each with one partner."""
        if not wanted or len(wanted) != len(given) or len(wanted) > _MAX_ITEMS:
            return False
        if ordered or len(wanted) == 1:
            return all(map(self._same_item, wanted, given))
        left = list(given)
        for item in sorted(wanted, key=lambda w: squeeze(w) not in map(squeeze, given)):
            same_text = (c for c in left if squeeze(c) == squeeze(item))
            partner = next(same_text, None)
            if partner is None:
                partner = next((c for c in left if self._same_item(item, c)), None)
            if partner is None:
                return False
            left.remove(partner)
        return True

    def _same_item(self, gold: str, answer: str) -> bool:
        gold, answer = unwrap(gold), unwrap(answer)
        if squeeze(gold) == squeeze(answer):
            return True
        rows, given_rows = matrix(gold), matrix(answer)
        if rows and given_rows:
            return self._same_matrix(rows, given_rows)
        gold, answer = as_interval(gold) or gold, as_interval(answer) or answer
        if _SET_ALGEBRA.search(gold + answer):
            return self._same_set(gold, answer)
        wanted, given = brackets(gold), brackets(answer)
        if wanted and given:
            return self._same_brackets(wanted, given)
        if wanted or given:
            return False
        if split_relation(gold) or split_relation(answer):
            return self._same_inequality(gold, answer)
        if max(len(split_top(text, "=")) for text in (gold, answer)) > 1:
            return self._same_equation(gold, answer)
        return self._same_quantity(gold, answer)

    def _same_matrix(self, gold: list[list[str]], answer: list[list[str]]) -> bool:
        return [*map(len, gold)] == [*map(len, answer)] and all(
            self._match(g, a, ordered=True) for g, a in zip(gold, answer, strict=True)
        )

    def _same_set(self, gold: str, answer: str) -> bool:
        """Compares unions part by part, and other set algebra with SymPy."""
        wanted, given = (split_top(text, r"\\cup(?![a-z])") for text in (gold, answer))
        if len(wanted) == len(given) > 1 and self._match(wanted, given, ordered=False):
            return True
        return self._same_formula(gold, answer)

    def _same_brackets(
        self, gold: tuple[str, list[str]], answer: tuple[str, list[str]]
    ) -> bool:
        (kind, wanted), (other_kind, given) = gold, answer
        is_ordered = kind != r"\{\}"
        return kind == other_kind and self._match(wanted, given, ordered=is_ordered)

    def _same_inequality(self, gold: str, answer: str) -> bool:
        """Compares `l < r` by the sign of the constant between their differences."""
        wanted, given = ordered_difference(gold), ordered_difference(answer)
        if wanted is None or given is None or wanted[0] != given[0]:
            return False
        ratio = self._ratio(wanted[1], given[1])
        return bool(ratio is not None and ratio > 0)

    def _same_equation(self, gold: str, answer: str) -> bool:
        wanted, given = (split_top(text, "=") for text in (gold, answer))
        if len(wanted) == 1:
            return self._same_chain(gold, given)
        name, value = named_value(gold)
        if name and (len(given) == 1 or name == name_of(given[0])):
            return self._same_chain(value, given[1:] or given)
        if len(wanted) != 2 or len(given) != 2:
            return False
        if any(r"\text" in side for side in wanted + given):
            return words(gold) == words(answer)
        differences = (f"{left}-({right})" for left, right in (wanted, given))
        return self._ratio(*differences) is not None

    def _same_chain(self, gold: str, parts: list[str]) -> bool:
        """Compares a value with `name = a = b`: each part must be right.

        A decimal in the chain may be rounded to any number of digits, as long as
        another part is right as it stands.
        """
        if len(parts) > 1 and name_of(parts[0]) not in (None, squeeze(gold)):
            parts = parts[1:]
        exact = [self._same_item(gold, part) for part in parts]
        return any(exact) and all(
            right or self._is_rounding(part, gold)
            for right, part in zip(exact, parts, strict=True)
        )

    def _same_quantity(self, gold: str, answer: str) -> bool:
        gold, answer = after_approximation(gold), after_approximation(answer)
        wanted, given = split_quantity(gold), split_quantity(answer)
        if wanted is None or given is None:
            return bool(words(gold)) and words(gold) == words(answer)
        wanted, given = _angle_in_formula(wanted), _angle_in_formula(given)
        if "%" in (wanted.unit, given.unit):
            return self._same_percentage(wanted, given)
        if wanted.unit == given.unit or not (wanted.unit and given.unit):
            return self._same_value(wanted.value, given.value)
        self._need_symbolic()
        factor = conversion(wanted.unit, given.unit)
        if factor is None:
            return False
        return self._same_value(rf"({wanted.value})\cdot ({factor})", given.value)

    def _same_percentage(self, gold: Quantity, answer: Quantity) -> bool:
        """Compares with a percentage on one side or both.

        36% is 0.36, and also a bare 36, as questions often name the unit. A bare gold
        answer of at most 1 is a share, and only equals the percentage by value.
        """
        if {gold.unit, answer.unit} == {"%"}:
            return self._same_value(gold.value, answer.value)
        if gold.unit and answer.unit:
            return False
        by_value = [rf"({q.value})/100" if q.unit else q.value for q in (gold, answer)]
        if self._same_value(*by_value):
            return True
        number = _rational(gold.value, Reason.GOLD_UNPARSED)
        may_be_bare = gold.unit or number is None or abs(number) > 1
        return bool(may_be_bare) and self._same_value(gold.value, answer.value)

    def _same_value(self, gold: str, answer: str) -> bool:
        """Compares two formulas without words or units."""
        if squeeze(gold) == squeeze(answer):
            return True
        if ":" in gold + answer:  # a ratio or a time of day
            return self._match(gold.split(":"), answer.split(":"), ordered=True)
        if _BASED.fullmatch(gold) or _BASED.fullmatch(answer):
            return _same_based(gold, answer)
        exact = _rational(gold, Reason.GOLD_UNPARSED)
        given = _rational(answer, Reason.ANSWER_UNPARSED)
        if exact is not None and given is not None:
            return (
                exact == given
                or _is_rounding(answer, exact, MIN_ROUNDED_DIGITS)
                or _is_rounding(gold, given, MIN_ROUNDED_DIGITS)
            )
        return self._same_formula(gold, answer)

    def _same_formula(self, gold: str, answer: str) -> bool:
        self._need_symbolic()
        self._parse(gold, Reason.GOLD_UNPARSED)
        self._parse(answer, Reason.ANSWER_UNPARSED)
        return (
            symbolic.same_formula(gold, answer)
            or self._is_rounding(answer, gold, MIN_ROUNDED_DIGITS)
            or self._is_rounding(gold, answer, MIN_ROUNDED_DIGITS)
        )

    def _is_rounding(self, text: str, of: str, min_digits: int = 1) -> bool:
        """Whether a decimal literal is a rounding of a value that never ends."""
        if decimal_places(text) is None:
            return False
        value = evaluate(of)
        if value is None:
            self._need_symbolic()
            value = symbolic.approximate(of)
        return value is not None and _is_rounding(text, value, min_digits)

    def _ratio(self, gold: str, answer: str) -> Fraction | None:
        self._need_symbolic()
        self._parse(gold, Reason.GOLD_UNPARSED)
        self._parse(answer, Reason.ANSWER_UNPARSED)
        return symbolic.constant_ratio(gold, answer)

    def _parse(self, text: str, reason: Reason) -> None:
        try:
            symbolic.parse(text)
        except UnparsedError:
            raise UnusableError(reason, f"no formula: {text[:60]!r}") from None

    def _need_symbolic(self) -> None:
        if not self.symbolic:
            raise NeedsSymbolicError


def _tells_apart(wanted: list[str], given: list[str]) -> bool:
    """Whether one side says which value is which, by names or units, and one does not.

    Without names, the order is all that tells `x = 1, y = 2` from `x = 2, y = 1`.
    """

    def marks(parts: list[str]) -> set[str]:
        """The names and units that tell the parts apart."""
        quantities = (split_quantity(part) for part in parts)
        names = (named_value(part)[0] for part in parts)
        return {*filter(None, names), *(q.unit for q in quantities if q and q.unit)}

    counts = sorted((len(marks(wanted)), len(marks(given))))
    return counts[0] == 0 and counts[1] > 1


def _rational(text: str, reason: Reason) -> Fraction | None:
    """Returns the value of a plain number, None if it is another kind of formula."""
    if re.search(r"(?<![_\d])\d+\s+\d", text):
        raise UnusableError(reason, f"two numbers side by side: {text[:60]!r}")
    try:
        return evaluate(text)
    except TooLargeError as error:
        raise UnusableError(reason, str(error)) from None
    except ZeroDivisionError:
        raise UnusableError(reason, f"division by zero: {text[:60]!r}") from None


def _is_rounding(text: str, value: Any, min_digits: int) -> bool:
    """Whether a decimal literal stands for a value whose digits never end.

    It does if it has enough significant digits and differs by less than one unit in
    its last place, so that rounding and cutting off are both accepted.
    """
    digits = decimal_places(text)
    if digits is None or digits[0] < min_digits:
        return False
    if isinstance(value, Fraction) and is_terminating(value):
        return False
    return bool(
        abs(value - Fraction(text.replace(" ", ""))) < Fraction(1, 10 ** digits[1])
    )


def _same_based(gold: str, answer: str) -> bool:
    """Compares numerals such as `52_8`; a base that one side leaves out is implied."""
    matches = (_BASED.fullmatch(text) for text in (gold, answer))
    (digits, base), (given, given_base) = (
        match.groups() if match else (text, None)
        for match, text in zip(matches, (gold, answer), strict=True)
    )
    return digits == given and (base == given_base or None in (base, given_base))


def _angle_in_formula(quantity: Quantity) -> Quantity:
    """Reads the degree sign of `sin 30°` as part of the formula, not as a unit."""
    if quantity.unit == "degree" and _FUNCTION.search(quantity.value):
        return Quantity(rf"{quantity.value}\degree")
    return quantity
