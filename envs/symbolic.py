"""Decides whether two formulas are equal, with math-verify's LaTeX parser and SymPy.

Numbers are compared at 60 digits, relative to their size; formulas with symbols at
seeded random points; relations, sets and the rest by math-verify's own comparison.
Nothing here is bounded in time: run it where it can be killed.
"""

import random
import re
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

_DIGITS = 60
_RELATIVE_TOLERANCE = 1e-55
_NUM_POINTS = 4
_NUM_INTEGER_POINTS = 12
_MAX_DEPTH = 60  # of brackets; the parser's time grows with the depth without bound
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_SUBSCRIPTED = re.compile(
    r"(?<![a-zA-Z\\])((?!\\(?:log|lim|int|sum|prod|max|min)(?![a-z]))(?:\\[a-zA-Z]+|[a-zA-Z]))"
    r"\s*_\s*(\{(?:[^{}]|\{[^{}]*\})*\}|\\[a-zA-Z]+|\w)"
)
# Letters that name functions by custom; any other one multiplies a bracket after it.
_FUNCTION_LETTERS = frozenset("fghFGH")


class UnparsedError(ValueError):
    """A text that is no formula; its first argument is that text."""


def parse(latex: str) -> Any:
    """Parses LaTeX into a SymPy object, decimals as exact fractions.

    Raises:
        UnparsedError: if the parser does not understand it, it is nested too deeply, or
            it has no value (0/0).
    """
    steps = ({"(": 1, "{": 1, "[": 1}.get(c, -1) for c in latex if c in "(){}[]")
    if max(accumulate(steps), default=0) > _MAX_DEPTH:
        raise UnparsedError(latex)
    latex = latex.replace(r"\degree", r"\cdot\frac{\pi}{180}")
    latex = latex.replace(r"\%", r"\cdot\frac{1}{100}")
    latex = _SUBSCRIPTED.sub(_as_name, latex)
    # The grammar takes these two letters for functions, whatever follows.
    latex = re.sub(r"\\(gamma|beta)(?![a-zA-Z(])", r"\\text{\1}", latex)
    return _parse_cached(_DECIMAL.sub(_as_fraction, latex))


@lru_cache(maxsize=256)
def _parse_cached(latex: str) -> Any:
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    try:
        parsed = latex2sympy(
            latex,
            normalization_config=None,
            conversion_config=ConversionConfig(
                interpret_as_mixed_fractions=False, lowercase_symbols=False
            ),
        )
        if isinstance(parsed, sympy.Expr):
            parsed = _products_for_functions(parsed)
            parsed = parsed.subs(sympy.Symbol("i"), sympy.I)
    except MemoryError:
        raise
    except Exception as error:  # the grammar raises bare Exception
        raise UnparsedError(latex) from error
    if isinstance(parsed, sympy.Basic) and parsed.has(sympy.nan, sympy.zoo):
        raise UnparsedError(latex)
    return parsed


def same_formula(gold: str, answer: str) -> bool:
    """Tells whether two LaTeX formulas mean the same.

    Raises:
        UnparsedError: for a text that is no formula.
    """
    import sympy

    a, b = parse(gold), parse(answer)
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return _math_verify(a, b)
    equal = _same_value(a, b)
    return _math_verify(a, b) if equal is None else equal


def constant_ratio(gold: str, answer: str) -> Any | None:
    """Returns the constant that gold is times answer, or None if it is no constant.

    Two equations `l = r` mean the same when such a constant exists between their
    differences `l - r`; two inequalities, when it is also positive.
    """
    import sympy

    a, b = parse(gold), parse(answer)
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return None
    symbols = _symbols(a, b)
    points = [p for p in _points(symbols) if _ratio(a, b, p) is not None]
    if len(points) < 2 or a.free_symbols != b.free_symbols:
        return None
    ratios = [_ratio(a, b, point) for point in points]
    return ratios[0] if all(_close(r, ratios[0]) for r in ratios) else None


def approximate(latex: str) -> Any | None:
    """Returns a real number's value, as a `Fraction` if it is rational, else None."""
    import sympy

    parsed = parse(latex)
    if not isinstance(parsed, sympy.Expr):
        return None
    value = _evaluate(parsed, {})
    if value is None or not value.is_real:
        return None
    return Fraction(int(value.p), int(value.q)) if value.is_Rational else value


def _as_name(match: re.Match[str]) -> str:
    r"""Returns a subscripted symbol as one name: the grammar knows few subscripts."""
    symbol, subscript = (re.sub(r"\W|text|_", "", group) for group in match.groups())
    return rf"\text{{{symbol}sub{subscript}}}"


def _as_fraction(match: re.Match[str]) -> str:
    whole, places = match.groups()
    return rf"\frac{{{int(whole + places)}}}{{{10 ** len(places)}}}"


def _products_for_functions(parsed: Any) -> Any:
    """Reads `n(n+1)` as a product, which the grammar takes for a function named n.

    Other unknown functions, such as f(x) or I(0), become symbols of their own.
    """
    from sympy.core.function import AppliedUndef

    def is_product(node: Any) -> bool:
        """Whether a call of a function is a letter times a bracket."""
        return (
            isinstance(node, AppliedUndef)
            and len(node.args) == 1
            and node.func.__name__ not in _FUNCTION_LETTERS
            and bool(node.args[0].free_symbols)
        )

    def product(node: Any) -> Any:
        """Writes the call as that product."""
        import sympy

        return sympy.Symbol(node.func.__name__) * node.args[0]

    def symbol(node: Any) -> Any:
        """Names a value of an unknown function after the call."""
        import sympy

        return sympy.Symbol(f"{node.func.__name__} of {node.args}")

    parsed = parsed.replace(is_product, product)
    return parsed.replace(lambda node: isinstance(node, AppliedUndef), symbol)


def _same_value(a: Any, b: Any) -> bool | None:
    """Compares by value; None if some values cannot be computed."""
    points = _points(_symbols(a, b))
    pairs = [(_evaluate(a, p), _evaluate(b, p)) for p in points]
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    if len(known) < min(2, len(points)):
        return None
    if all(_close(x, y) for x, y in known):
        return True
    if not _is_about_integers(a, b):
        return False
    pairs = [
        (_evaluate(a, p), _evaluate(b, p)) for p in _integer_points(_symbols(a, b))
    ]
    return all(x is not None and y is not None and _close(x, y) for x, y in pairs)


def _symbols(*expressions: Any) -> list[Any]:
    """Returns the free symbols in a fixed order."""
    return sorted(set().union(*(e.free_symbols for e in expressions)), key=str)


def _points(symbols: list[Any]) -> list[dict[Any, Any]]:
    """Positive points and one with negative coordinates; one empty point for none."""
    from sympy import Rational

    if not symbols:
        return [{}]
    draw = random.Random(0)
    signs = [1] * _NUM_POINTS + [-1]
    return [
        {s: Rational(sign * draw.randint(300, 2500), 1009) for s in symbols}
        for sign in signs
    ]


def _integer_points(symbols: list[Any]) -> list[dict[Any, Any]]:
    from sympy import Integer

    draw = random.Random(1)
    return [
        {s: Integer(draw.randint(2, 40)) for s in symbols}
        for _ in range(_NUM_INTEGER_POINTS)
    ]


def _is_about_integers(a: Any, b: Any) -> bool:
    """Whether an identity may hold for integers only: floors, (-1)^n, and the like."""
    import sympy

    kinds = (sympy.floor, sympy.ceiling, sympy.Mod, sympy.factorial, sympy.binomial)
    if any(e.has(*kinds, sympy.Sum, sympy.Product) for e in (a, b)):
        return True
    powers = a.atoms(sympy.Pow) | b.atoms(sympy.Pow)
    return any(p.base.is_negative and p.exp.free_symbols for p in powers)


def _evaluate(expression: Any, point: dict[Any, Any]) -> Any | None:
    """Returns the value at a point, or None where there is no finite number."""
    import sympy

    try:
        if point:
            value = expression.evalf(_DIGITS, subs=point, maxn=1000)
        else:
            value = expression.doit()
            value = value if value.is_Rational else value.evalf(_DIGITS, maxn=1000)
    except MemoryError:
        raise
    except Exception:  # SymPy has no common error class
        return None
    if not (value.is_number and value.is_finite):
        return None
    # An exact zero evaluates to noise without a significant digit.
    noise = {f: sympy.Integer(0) for f in value.atoms(sympy.Float) if f._prec < 8}
    return value.xreplace(noise)


def _close(x: Any, y: Any) -> bool:
    if x.is_Rational and y.is_Rational:
        return bool(x == y)
    size = max(abs(x), abs(y))
    return bool(size == 0 or abs(x - y) <= _RELATIVE_TOLERANCE * size)


def _ratio(a: Any, b: Any, point: dict[Any, Any]) -> Any | None:
    x, y = _evaluate(a, point), _evaluate(b, point)
    return x / y if x is not None and y not in (None, 0) else None


def _math_verify(a: Any, b: Any) -> bool:
    from math_verify import verify

    # The caller bounds the time; math-verify would use the process's alarm signal.
    return bool(verify(a, b, timeout_seconds=None, allow_set_relation_comp=True))
