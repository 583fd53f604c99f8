"""Writes the tables of settings and metrics into the pages, from the code itself."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

_ENTRY = re.compile(r"^ {4}(\w+): ", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replaces the line `{{ settings }}`, `{{ buffer }}` or `{{ metrics }}`."""
    for name, table in (
        ("settings", _settings),
        ("buffer", _buffer),
        ("metrics", _metrics),
    ):
        mark = f"{{{{ {name} }}}}"
        if mark in markdown:
            markdown = markdown.replace(mark, "\n".join(table()))
    return markdown


def _settings() -> Iterator[str]:
    from rllib_exgrpo import ExGRPOConfig

    config = ExGRPOConfig()
    for setter in ("training", "language_model", "engine", "learners", "evaluation"):
        yield f"\n## `{setter}()`\n"
        yield from _knobs(getattr(ExGRPOConfig, setter), lambda k: getattr(config, k))


def _buffer() -> Iterator[str]:
    from rllib_exgrpo.exgrpo_replay import ExGRPOReplayBuffer

    defaults = inspect.signature(ExGRPOReplayBuffer).parameters
    yield from _knobs(ExGRPOReplayBuffer, lambda knob: defaults[knob].default)


def _knobs(documented: Any, default_of: Callable[[str], Any]) -> Iterator[str]:
    yield "| Setting | Default | Meaning |"
    yield "|---|---|---|"
    for knob, text in _arguments(inspect.getdoc(documented) or ""):
        if knob != "kwargs":
            yield f"| `{knob}` | {_default(default_of(knob))} | {_cell(text)} |"


def _default(value: Any) -> str:
    return "" if value is inspect.Parameter.empty else f"`{value!r}`"


def _arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """Yields name and text of each entry of a Google-style `Args:` section."""
    section = docstring.partition("Args:\n")[2]
    section = re.split(r"\n(?=\S)", section)[0]
    parts = _ENTRY.split(section)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        yield name, " ".join(text.split())


def _metrics() -> Iterator[str]:
    from rllib_exgrpo.metric_names import METRICS

    yield "| Path in the result | Unit | Meaning |"
    yield "|---|---|---|"
    for path, metric in METRICS.items():
        yield f"| `{path}` | {metric.unit} | {_cell(metric.meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
