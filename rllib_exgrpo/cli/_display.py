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
        """Prints lines that stay; the table is shown anew below them."""
        self.show(lines)
        self._height = 0


class Display(tune.Callback):
    """Shows the progress of a run and keeps its results.

    Args:
        progress: turns results into text.
        stream: where to; a terminal gets the table, anything else a line a step.
    """

    def __init__(self, progress: Progress, stream: TextIO | None = None) -> None:
        self.results: list[Mapping[str, Any]] = []
        self._progress = progress
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
        self.results.append(result)
        self._last_step = time.monotonic()
        lines = self._progress.lines(result)
        if self._table is None:
            if len(self.results) == 1:
                lines = ["", *LEGEND.splitlines(), "", *lines]
            print(*lines, sep="\n", file=self._stream, flush=True)
            return
        evaluated = self._progress.evaluation_lines(result)
        if evaluated:
            self._table.print_above([f"Held-out {text}" for text in evaluated])
        self._draw()

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Redraws the table now and then, as a sign of life."""
        if time.monotonic() - self._last_drawn > _REDRAW_EVERY_S:
            self._draw()

    def _draw(self) -> None:
        self._last_drawn = time.monotonic()
        if self._table is not None:
            since = self._last_drawn - self._last_step
            self._table.show(self._progress.table(self.results[-1:], since))
