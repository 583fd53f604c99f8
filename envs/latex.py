r"""Brings the many spellings of an answer into one LaTeX dialect, text to text.

In that dialect there are no dollars, no sizing and spacing commands, every argument of
`\frac` and `\sqrt` is braced, words stand in `\text{...}`, a currency sign is
`\currency{name}`, a degree sign `\degree`, and numbers have neither separators nor
exponents in E-notation.
"""
# ruff: noqa: RUF001 # look-alike characters are what this file is about

import re
import unicodedata
from collections.abc import Callable

FUNCTIONS = (
    r"arc(?:sin|cos|tan|cot|sec|csc)|(?:sin|cos|tan|cot)h|sin|cos|tan|cot|sec|csc"
    r"|sqrt|log|ln|lg|exp|max|min|gcd|lcm|det"
)
CONNECTIVES = ("and", "or")
_SHORT_UNITS = r"[mcdk]m|[mk]g|[mdc]l|ft|yd|mi|in|oz|lb|hr"

_SYMBOLS = {
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": r"\cdot ", "÷": "/",
    "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ",
    "≈": r"\approx ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∖": r"\setminus ", "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ", "−": "-",
    "–": "-", "—": "-", "⁻": "^-", "°": r"\degree ", "√": r"\sqrt ", "∛": r"\sqrt[3] ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "。": ".", "、": ",", "…": r"\ldots ",
    "′": "'", "⟨": r"\langle ", "⟩": r"\rangle ",
}  # fmt: skip
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+")
_SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_GREEK = {
    unicodedata.name(chr(code)).split()[-1].lower().replace("lamda", "lambda")
    for code in range(ord("α"), ord("ω") + 1)
} - {"omicron"}

_TEXT = r"\\text\{[^{}]*\}"
_NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)"

_Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


def _rules(*pairs: tuple[str, str | Callable[[re.Match[str]], str]]) -> list[_Rule]:
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


def normalise(text: str) -> str:
    """Returns an answer in the dialect of this module."""
    text = _ascii(text)
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)
    text = _substitute(text, _SPELLING)
    text = brace_arguments(text)
    text = _outside_text(text, lambda part: _substitute(part, _PLAIN_NAMES))
    text = brace_arguments(text)
    text = _outside_text(
        text, lambda part: _wrap_words(_RATE.sub(r"\1\\text{\2}", part))
    )
    text = _substitute(text, _NUMBERS)
    return re.sub(r"\s+", " ", text).lstrip(" ,;:").rstrip(" .,;:")


def squeeze(latex: str) -> str:
    """Drops the spaces that never change the meaning: all but those between digits."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", latex)


def _ascii(text: str) -> str:
    """Turns unicode mathematics into LaTeX, and drops invisible characters."""
    text = _SUPERSCRIPTS.sub(lambda m: f"^{{{_compatible(m.group())}}}", text)
    text = _SUBSCRIPTS.sub(lambda m: f"_{{{_compatible(m.group())}}}", text)
    text = re.sub("√([0-9]+)", r"\\sqrt{\1}", text)
    return text if text.isascii() else "".join(map(_ascii_character, text))


def _compatible(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("−", "-")


def _ascii_character(char: str) -> str:
    if char.isascii() or char in _SYMBOLS:
        return _SYMBOLS.get(char, char)
    category, name = unicodedata.category(char), unicodedata.name(char, "")
    if category == "Cf":
        return ""
    if category == "Sc":  # e.g. EURO SIGN
        return rf"\currency{{{name.removesuffix(' SIGN').lower()}}}"
    if name.startswith("GREEK") and "LETTER" in name and " WITH " not in name:
        letter = name.split()[-1].lower().replace("lamda", "lambda")
        return rf"\{letter.title() if 'CAPITAL' in name else letter} "
    plain = unicodedata.normalize("NFKC", char)
    if "⁄" in plain:  # a vulgar fraction
        return r"\frac{{{}}}{{{}}}".format(*plain.split("⁄"))
    return plain


def _unwrap_text(match: re.Match[str]) -> str:
    r"""Keeps `\text` for words; numbers and single symbols stand bare."""
    command, content = match["command"], match["content"]
    name = content.strip()
    if re.fullmatch(FUNCTIONS, name) and command in ("mathrm", "operatorname", "text"):
        return rf"\{name} "
    is_words = len(re.findall("[a-zA-Z]", name)) >= 2 or command in _TEXT_COMMANDS
    if not re.search("[a-zA-Z]", name) or re.search(r"\d", name) or not is_words:
        return f" {content} "
    if command in ("mathbf", "mathit", "mathsf", "boldsymbol", "bm"):
        return f" {content} "
    return rf"\text{{{content}}}"


_TEXT_COMMANDS = ("text", "mbox", "textbf", "textit", "textrm", "textsf", "textnormal")
_FONTS = "mathrm|operatorname|mathbf|mathit|mathsf|boldsymbol|bm|emph|hbox"
_WRAPPERS = "|".join((*_TEXT_COMMANDS, _FONTS))


def _repeating_decimal(match: re.Match[str]) -> str:
    r"""Returns `a.b\overline{c}` as a fraction."""
    whole, fixed, cycle = match["whole"] or "0", match["fixed"], match["cycle"]
    if len(whole + fixed + cycle) > 40:
        return match.group()
    numerator = int(whole + fixed + cycle) - int(whole + fixed)
    denominator = (10 ** len(cycle) - 1) * 10 ** len(fixed)
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _mixed_number(match: re.Match[str]) -> str:
    whole, top, bottom = match.groups()
    if len(top) > len(bottom) or (len(top) == len(bottom) and top >= bottom):
        return match.group()
    return rf"({whole}+\frac{{{top}}}{{{bottom}}})"


_SPELLING = _rules(
    (r"\\\$", r"\\currency{dollar}"),
    (r"\$|(?<!\\)\\[()\[\]]", " "),
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?", ""),
    (r"(?<=\d)(?:\{,\}|,\\!|\\[,;: ]|~)\s*(?=\d{3}(?!\d))", ""),
    (r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d/])",
     lambda m: m.group().replace(" ", "")),
    (r"(?<!\\)\\[,;:! ]|~", " "),
    (r"\\(?:q?quad|displaystyle|textstyle|limits|nolimits|phantom\{[^{}]*\})(?![a-zA-Z])",
     " "),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\dbinom|\\tbinom", r"\\binom"),
    (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\(?:degrees?|textdegree)(?![a-zA-Z])",
     r"\\degree "),
    (r"\\?%", r"\\% "),
    (r"\\leq?(?:slant)?(?![a-zA-Z])|<=", r"\\le "),
    (r"\\geq?(?:slant)?(?![a-zA-Z])|>=", r"\\ge "),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\neq?(?![a-zA-Z])|!=", r"\\ne "),
    (r"\\(?:backslash|smallsetminus)(?![a-zA-Z])", r"\\setminus "),
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\langle(?![a-zA-Z])", "("),
    (r"\\rangle(?![a-zA-Z])", ")"),
    (r"\\(?:lvert|rvert|vert)(?![a-zA-Z])", "|"),
    (r"\\div(?![a-zA-Z])", "/"),
    (r"\\(?:dots[cbmio]?|ldots|cdots)(?![a-zA-Z])|\.\.\.", r"\\ldots "),
    (r"\\simeq|\\doteq", r"\\approx "),
    (rf"\\(?P<command>{_WRAPPERS})\s*\{{(?P<content>[^{{}}]*)\}}", _unwrap_text),
    (r"(?<!\d)(?P<whole>\d*)\.(?P<fixed>\d*)\\(?:overline|bar)\s*\{?(?P<cycle>\d+)\}?",
     _repeating_decimal),
    (r"\*\*", "^"),
    (r"\\ast(?![a-zA-Z])|\*", r"\\cdot "),
    (rf"(?<![a-zA-Z\d.])({_NUMBER})\.?[eE]([+-]?\d+)(?![a-zA-Z\d.])",
     r"\1\\cdot 10^{\2}"),
    (r"(?<=\d)\.(?![\d.])", ""),
)  # fmt: skip

_PLAIN_NAMES = _rules(
    (r"(?<![\\a-zA-Z])(?:np|numpy|math|sympy)\.(?=[a-z])", ""),
    (rf"(?<![\\a-zA-Z])({FUNCTIONS}|{'|'.join(sorted(_GREEK))})(?![a-zA-Z])",
     r"\\\1 "),
    (r"(?<![\\a-zA-Z])infinity(?![a-zA-Z])", r"\\infty "),
)  # fmt: skip

_NUMBERS = _rules(
    (r"(?<![\d.^_{}/\w\\])(\d+)\s*\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}", _mixed_number),
    (r"(?<![\d.^_{}/\w\\])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", _mixed_number),
)


def _substitute(text: str, rules: list[_Rule]) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _outside_text(text: str, change: Callable[[str], str]) -> str:
    r"""Applies a change to everything but `\text{...}`."""
    parts = re.split(rf"({_TEXT}|\\(?:currency|begin|end)\{{[^{{}}]*\}})", text)
    return "".join(p if i % 2 else change(p) for i, p in enumerate(parts))


_RATE = re.compile(rf"(\d )((?:{_SHORT_UNITS})/(?:s|h|{_SHORT_UNITS}))(?![a-zA-Z])")
_PHRASE = re.compile(r"(?<![\\a-zA-Z_^{])[a-zA-Z]+(?:[ '-]+[a-zA-Z]+)*(?![a-zA-Z])")


def _wrap_words(part: str) -> str:
    r"""Puts undecorated words into `\text{...}`; letters of a formula stay.

    A run of four letters is a word, and so are its neighbours in a phrase. Shorter
    runs are products of symbols, but for connectives, runs of three letters that stand
    alone, and units after a number.
    """

    def wrap(match: re.Match[str]) -> str:
        """Returns a phrase, in a wrapper if it is words."""
        phrase, before, after = (
            match.group(),
            part[: match.start()],
            part[match.end() :],
        )
        runs = re.findall("[a-zA-Z]+", phrase)
        longest = max(map(len, runs))
        alone = not (before + after).strip()
        spaced = before[-1:] in ("", " ", ",") and after[:1] in ("", " ", ",", ".")
        is_unit = bool(re.search(r"\d $", before)) and len(runs) == 1 and longest > 1
        is_word = (
            longest >= 4
            or any(run in CONNECTIVES for run in runs)
            or (longest == 3 and (alone or spaced))
            or (is_unit and spaced and re.fullmatch(_SHORT_UNITS, phrase))
        )
        return rf"\text{{{phrase}}}" if is_word else phrase

    return _PHRASE.sub(wrap, part)


_COMMAND = re.compile(r"\\(frac|binom|sqrt)(?![a-zA-Z])\s*(\[[^\[\]]*\])?")
_ANY_TOKEN = re.compile(r"\\[a-zA-Z]+|\\?.", re.DOTALL)
_CLOSERS = {"(": ")", "{": "}", "[": "]"}


def brace_arguments(text: str) -> str:
    r"""Braces the arguments of `\frac`, `\binom` and `\sqrt`: `\frac12`, `\sqrt(5)`."""
    pieces: list[str] = []
    open_groups: list[tuple[str, int]] = []  # how it closes, arguments wanted after
    wanted, position = 0, 0
    while position < len(text):
        command = _COMMAND.match(text, position)
        token = command or _ANY_TOKEN.match(text, position)
        assert token is not None  # any character matches
        position, char = token.end(), token.group()
        if command:
            pieces.append(rf"\{command[1]}{command[2] or ''}")
            wanted += 1 if command[1] == "sqrt" else 2
        elif wanted and char in ("(", "{"):
            pieces.append("{")
            open_groups.append(("}", wanted - 1))
            wanted = 0
        elif char in _CLOSERS:
            pieces.append(char)
            open_groups.append((_CLOSERS[char], 0))
        elif char in (")", "}", "]") and open_groups:
            # Half-open intervals close with another bracket than they open with.
            closer, wanted = open_groups.pop()
            pieces.append("}" if closer == "}" else char)
        elif wanted and not char.isspace():
            pieces.append(f"{{{char}}}")
            wanted -= 1
        elif not wanted:
            pieces.append(char)
    return "".join(pieces)


def closing(text: str, start: int) -> int:
    """Returns where the bracket at `start` closes; the end of the text if nowhere."""
    depth = 0
    for match in re.finditer(r"\\?[({\[\])}]", text[start:]):
        depth += 1 if match.group()[-1] in "({[" else -1
        if depth == 0:
            return start + match.end() - 1
    return len(text)


def split_top(text: str, separator: str) -> list[str]:
    """Splits at a separator (a pattern) that stands outside all brackets."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(
        rf"(?P<open>[({{\[])|(?P<close>[)}}\]])|{separator}", text
    ):
        if match["open"]:
            depth += 1
        elif match["close"]:
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]
