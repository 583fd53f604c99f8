"""The terminal while a run goes on: one table, redrawn, or else a line a step."""

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from ray import tune
from ray.tune.experiment import Trial

from rllib_exgrpo.cli._progress import LEGEND, Progress

_REDRAW_EVERY_S = 1.0


class LiveTable:
    """Lines at the end of a terminal's output that are replaced, not repeated.

    Args:
        stream: a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._height = 0

    def show(self, lines: Sequence[str]) -> None:
        """Replaces the lines shown before."""
        width = shutil.get_terminal_size().columns - 1
        # Up to the first of the old lines, then clear to the end.
        back = f"\x1b[{self._height}F\x1b[J" if self._height else ""
        text = "".join(f"{line[:width]}\n" for line in lines)
        self._stream.write(back + text)
        self._stream.flush()
        self._height = len(lines)

    def print_above(self, lines: Sequence[str]) -> None:
        """Puts lines that stay, however long, in the table's place."""
        self.show([])
        print(*lines, sep="\n", file=self._stream, flush=True)


class Display(tune.Callback):
    """Shows the progress of a run.

    Args:
        progress: turns results into text.
        stream: where to; a terminal gets the table, anything else a line a step.
        latest: the last result of a run that is resumed.
    """

    def __init__(
        self,
        progress: Progress,
        stream: TextIO | None = None,
        *,
        latest: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._progress = progress
        self._latest = latest
        self._preface = ["", *LEGEND.splitlines(), ""]
        self._messages: list[str] = []
        self._stream = stream or sys.stdout
        is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._table = LiveTable(self._stream) if is_terminal else None
        self._last_step = self._last_drawn = time.monotonic()

    def on_trial_result(
        self,
        iteration: int,
        trials: list[Trial],
        trial: Trial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """Shows a training step."""
        self._latest = [result]
        self._last_step = time.monotonic()
        lines = self._progress.lines(result)
        if self._table is None:
            lines, self._preface = [*self._preface, *lines], []
        else:
            evaluated = self._progress.evaluation_lines(result)
            lines = [f"Held-out {text}" for text in evaluated]
        self._print(lines)
        self._draw()

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Prints messages, and redraws the table now and then, as a sign of life."""
        messages, self._messages = self._messages, []
        self._print(messages)
        if messages or time.monotonic() - self._last_drawn > _REDRAW_EVERY_S:
            self._draw()

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        """Draws the table a last time, without a step under way."""
        self._draw(is_over=True)

    def say(self, text: str) -> None:
        """Has a message printed at the next event; a signal handler may call it."""
        self._messages.append(text)

    def _print(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        if self._table is None:
            print(*lines, sep="\n", file=self._stream, flush=True)
        else:
            self._table.print_above(lines)

    def _draw(self, *, is_over: bool = False) -> None:
        self._last_drawn = time.monotonic()
        if self._table is not None:
            since = None if is_over else self._last_drawn - self._last_step
            self._table.show(self._progress.table(self._latest, since))
