r"""Exact arithmetic on plain numeric LaTeX, in bounded time and memory.

Reads integers, decimals, `+ - / ! ^`, `\cdot`, `\times`, `\frac`, `\binom` and brackets
without recursion, and refuses numbers beyond `MAX_BITS` before it computes them.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

MAX_BITS = 14_000
"""Largest numerator or denominator, in bits: about 4200 decimal digits."""

_MAX_DIGITS = 4200
_MAX_FACTORIAL = 1400  # 1400! has 3803 digits

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<op>[-+/!^])"
    r"|(?P<times>\\cdot|\\times)|(?P<pair>\\frac|\\binom)"
    r"|(?P<open>[({\[])|(?P<close>[)}\]]))\s*"
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class TooLargeError(ValueError):
    """The value, or a step towards it, has too many digits to compute."""


def evaluate(latex: str) -> Fraction | None:
    """Returns the value of a plain numeric text, or None if it is not one.

    Raises:
        TooLargeError: beyond `MAX_BITS`.
        ZeroDivisionError: for a division by zero.
    """
    tokens = _tokens(latex)
    return None if tokens is None else _run(tokens)


def decimal_places(text: str) -> tuple[int, int] | None:
    """Returns (significant digits, places after the point) of a decimal literal."""
    match = re.fullmatch(r"[+-]?\s*(\d*)\.(\d+)", text.strip())
    if not match:
        return None
    whole, places = match.groups()
    return len((whole + places).lstrip("0")), len(places)


def is_terminating(value: Fraction) -> bool:
    """Whether the decimal expansion of a number ends."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _tokens(latex: str) -> list[str | Fraction] | None:
    """Splits into numbers and operators; fractions become bracketed divisions."""
    tokens: list[str | Fraction] = []
    closers: list[tuple[str, list[str]]] = []  # closing bracket, what it expands to
    awaits_group: list[str] | None = None
    position = 0
    while position < len(latex):
        match = _TOKEN.match(latex, position)
        if not match:
            return None
        position, kind, text = match.end(), match.lastgroup, match.group().strip()
        if awaits_group is not None and text != "{":
            return None
        if kind == "pair":
            tokens += [*_implied_product(tokens), "(", "("]
            between = "/" if text == r"\frac" else "choose"
            awaits_group = [")", between, "("]
        elif kind == "open" and awaits_group is not None:
            closers.append(("}", awaits_group))
            awaits_group = None
        elif kind == "open":
            tokens += [*_implied_product(tokens), "("]
            closers.append((_CLOSING[text], [")"]))
        elif kind == "close":
            if not closers or closers[-1][0] != text:
                return None
            expansion = closers.pop()[1]
            tokens += expansion
            awaits_group = [")", ")"] if len(expansion) == 3 else None
        elif kind == "number":
            if tokens and (isinstance(tokens[-1], Fraction) or tokens[-1] in (")!")):
                return None
            tokens.append(_number(text))
        else:
            tokens.append("*" if kind == "times" else text)
    return None if closers or awaits_group or not tokens else tokens


def _implied_product(tokens: list[str | Fraction]) -> list[str]:
    juxtaposed = tokens and (
        isinstance(tokens[-1], Fraction) or tokens[-1] in (")", "!")
    )
    return ["*"] if juxtaposed else []


def _number(text: str) -> Fraction:
    if len(text) > _MAX_DIGITS:
        raise TooLargeError(f"a number of {len(text)} digits")
    return Fraction(text)


_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "neg": 3, "^": 4, "choose": 5}
_RIGHT_ASSOCIATIVE = {"neg", "^"}


def _run(tokens: list[str | Fraction]) -> Fraction | None:
    """Evaluates by two stacks (Dijkstra's shunting yard)."""
    values: list[Fraction] = []
    pending: list[str] = []
    try:
        for token in _with_unary_minus(tokens):
            if isinstance(token, Fraction):
                values.append(token)
            elif token == "!":
                values.append(_factorial(values.pop()))
            elif token == "(":
                pending.append(token)
            elif token == ")":
                while pending[-1] != "(":
                    _apply(pending.pop(), values)
                pending.pop()
            else:
                while pending and _binds_first(pending[-1], token):
                    _apply(pending.pop(), values)
                pending.append(token)
        while pending:
            _apply(pending.pop(), values)
    except (IndexError, _NotRationalError):
        return None
    return values[0] if len(values) == 1 else None


class _NotRationalError(ValueError):
    """An operation whose result is no rational number."""


def _with_unary_minus(tokens: list[str | Fraction]) -> Iterator[str | Fraction]:
    previous: str | Fraction = "("
    for token in tokens:
        is_prefix = not isinstance(previous, Fraction) and previous not in (")", "!")
        if token == "-" and is_prefix:
            token = "neg"
        if not (token == "+" and is_prefix):
            yield token
        previous = token


def _binds_first(waiting: str, arriving: str) -> bool:
    """Whether an operator on the stack applies before the one that arrives."""
    if waiting == "(" or arriving == "neg":
        return False
    if arriving in _RIGHT_ASSOCIATIVE:
        return _PRECEDENCE[waiting] > _PRECEDENCE[arriving]
    return _PRECEDENCE[waiting] >= _PRECEDENCE[arriving]


def _apply(name: str, values: list[Fraction]) -> None:
    right = values.pop()
    values.append(-right if name == "neg" else _BINARY[name](values.pop(), right))
    if _bits(values[-1]) > MAX_BITS:
        raise TooLargeError(f"a number of over {_MAX_DIGITS} digits")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _NotRationalError
    if abs(base) not in (0, 1) and abs(exponent) * (_bits(base) - 1) > MAX_BITS:
        raise TooLargeError("a power of too many digits")
    return base**exponent.numerator


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise _NotRationalError
    if value > _MAX_FACTORIAL:
        raise TooLargeError("a factorial of too many digits")
    return Fraction(math.factorial(value.numerator))


def _choose(n: Fraction, k: Fraction) -> Fraction:
    if n.denominator != 1 or k.denominator != 1 or n < 0 or k < 0:
        raise _NotRationalError
    if n > MAX_BITS and min(k, n - k) > _MAX_FACTORIAL:
        raise TooLargeError("a binomial coefficient of too many digits")
    return Fraction(math.comb(n.numerator, k.numerator))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


_BINARY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "^": _power,
    "choose": _choose,
}
