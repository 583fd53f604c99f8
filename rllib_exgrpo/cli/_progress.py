"""What the terminal shows while a run goes on and when it has ended."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from rllib_exgrpo.evaluation.metrics import headline
from rllib_exgrpo.metric_names import value_of

LEGEND = """\
pass rate: right share of the step's fresh completions.  held-out: pass@1 on the
evaluation problems, ± standard error.  rho: replayed share of the step's prompts.
buffer, retired: prompts with stored successes, prompts solved for good.  rollout,
update: seconds of these parts of the step.  s/step: of the whole; the first one counts
the evaluation before it.  left: until the run stops."""

_COLUMN_WIDTHS = {
    "step": 6,
    "pass rate": 9,
    "held-out %": 12,
    "rho": 4,
    "buffer": 6,
    "retired": 7,
    "tokens/s": 8,
    "s/step": 6,
    "rollout": 7,
    "update": 6,
    "left": 7,
}
_LINES_PER_HEADER = 40
_BAR_WIDTH = 30
_PARTS = ("rollout", "update", "plan", "record", "sync")  # without overlap
_RECENT_STEPS = 10
_GROWS_STEADILY = (
    "training_iteration",
    "time_total_s",
    "*num_env_steps_sampled_lifetime",
    "*num_episodes_lifetime",
)


class Progress:
    """Turns results into lines of text.

    Args:
        stop: metric path to the value that ends the run.
        earlier: results of a run that is resumed.
    """

    def __init__(
        self, stop: Mapping[str, float], earlier: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._stop = {
            path: value
            for path, value in stop.items()
            if any(fnmatch(path, pattern) for pattern in _GROWS_STEADILY)
        }
        self._recent: deque[tuple[float, dict[str, float]]] = deque(
            maxlen=_RECENT_STEPS + 1
        )
        self._num_lines = 0
        self._seconds_left = math.nan
        self._held_out = [t for r in earlier for t in self.evaluation_lines(r)]

    def lines(self, result: Mapping[str, Any]) -> list[str]:
        """Returns the plain lines for a training step; call it once a step."""
        self._seconds_left = self.seconds_left(result)
        self._held_out += self.evaluation_lines(result)
        lines = []
        if self._num_lines % _LINES_PER_HEADER == 0:
            lines.append(_row(*_COLUMN_WIDTHS))
        self._num_lines += 1
        if "evaluation_at_start" in result:
            at_start = headline(result["evaluation_at_start"])
            lines.append(_row("0", "", format_pass_at_1(at_start)))
        return [*lines, self._step_line(result)]

    def _step_line(self, result: Mapping[str, Any]) -> str:
        runners, replay, timers = (
            result[key] for key in ("env_runners", "replay", "timers")
        )
        return _row(
            str(result["training_iteration"]),
            f"{100 * runners['pass_rate']:.1f} %",
            format_pass_at_1(headline(result.get("evaluation", {}))),
            f"{replay['num_prompts_replayed'] / runners['num_prompts']:.2f}",
            f"{replay['prompts']:,.0f}",
            f"{replay['retired']:,.0f}",
            f"{runners['tokens_per_second']:,.0f}",
            f"{result['time_this_iter_s']:.1f}",
            f"{timers['rollout_s']:.1f}",
            f"{timers['update_s']:.1f}",
            format_duration(self._seconds_left),
        )

    def evaluation_lines(self, result: Mapping[str, Any]) -> list[str]:
        """Returns a line for each evaluation in a result."""
        step = result["training_iteration"]
        found = (
            (when, format_pass_at_1(headline(result.get(key, {}))))
            for key, when in (("evaluation_at_start", 0), ("evaluation", step))
        )
        return [f"pass@1 {text} % after {n} steps" for n, text in found if text]

    def table(
        self, latest: Sequence[Mapping[str, Any]], since_s: float | None
    ) -> list[str]:
        """Returns the table for a terminal.

        Args:
            latest: the last result, or nothing before the first.
            since_s: time since then, None once the run is over.
        """
        waiting = {}
        if since_s is not None:
            name = "this step" if latest else "first step"
            waiting = {name: f"{format_duration(since_s)} so far"}
        if not latest:
            return ["", *(f"  {name}   {text}" for name, text in waiting.items())]
        (result,) = latest
        runners, replay = result["env_runners"], result["replay"]
        rho = replay["num_prompts_replayed"] / runners["num_prompts"]
        rows = {
            "progress": self._bar(result),
            "pass rate": f"{100 * runners['pass_rate']:.1f} % of "
            f"{runners['num_completions']:,.0f} fresh completions",
            "held-out": self._held_out[-1] if self._held_out else "not evaluated yet",
            "replay": f"rho {rho:.2f}, {replay['prompts']:,.0f} prompts in the buffer, "
            f"{replay['retired']:,.0f} retired",
            "speed": f"{runners['tokens_per_second']:,.0f} tokens/s",
            "last step": step_parts(result),
            **waiting,
        }
        return ["", *(f"  {name:<9}   {text}" for name, text in rows.items())]

    def _bar(self, result: Mapping[str, Any]) -> str:
        step = f"step {result['training_iteration']:,}"
        shares = [
            float(value_of(result, path) or 0.0) / end
            for path, end in self._stop.items()
        ]
        if not shares:
            return step
        share = min(1.0, max(shares))
        filled = round(share * _BAR_WIDTH)
        bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
        left = format_duration(self._seconds_left)
        return f"[{bar}] {100 * share:.0f} %, {step}, {left} left"

    def seconds_left(self, result: Mapping[str, Any]) -> float:
        """Estimates the time to the end from the latest steps.

        Returns:
            Seconds; NaN after the first step, which holds a warm-up, and where no stop
            criterion grows steadily.
        """
        now = result["time_total_s"]
        values = {path: float(value_of(result, path) or 0.0) for path in self._stop}
        self._recent.append((now, values))
        then, old = self._recent[0]
        estimates = [
            (end - values[path]) * (now - then) / (values[path] - old[path])
            for path, end in self._stop.items()
            if values[path] > old[path]
        ]
        return max(0.0, min(estimates)) if estimates else math.nan


def step_parts(result: Mapping[str, Any]) -> str:
    """Tells the time of a step and its parts, the longest first."""
    total = result["time_this_iter_s"]
    parts = {name: result["timers"][f"{name}_s"] for name in _PARTS}
    rest = "evaluation and other" if "evaluation" in result else "other"
    parts[rest] = max(0.0, total - sum(parts.values()))
    order = sorted(parts, key=lambda name: -parts[name])
    told = ", ".join(f"{n} {parts[n]:.1f}" for n in order if parts[n] >= 0.05)
    return f"{total:.1f} s: {told}"


def _row(*cells: str) -> str:
    widths = _COLUMN_WIDTHS.values()
    return "  ".join(
        f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)
    )


def format_pass_at_1(evaluation: Mapping[str, Any]) -> str:
    """Returns pass@1 and its standard error in per cent; empty if there is none."""
    if "pass_at_1" not in evaluation:
        return ""
    value, error = evaluation["pass_at_1"], evaluation.get("pass_at_1_stderr", math.nan)
    return f"{100 * value:.1f}" + ("" if math.isnan(error) else f" ± {100 * error:.1f}")


def format_duration(seconds: float) -> str:
    """Returns a time to the precision that a reader needs; "?" for NaN."""
    if math.isnan(seconds):
        return "?"
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"


def outcome(results: Sequence[Mapping[str, Any]]) -> str:
    """Tells held-out pass@1 before and after training."""
    at_start = [
        headline(r["evaluation_at_start"])
        for r in results
        if "evaluation_at_start" in r
    ]
    first = at_start[0] if at_start else None
    evaluated = [r for r in results if "evaluation" in r]
    if not evaluated:
        return "Held-out pass@1 was not measured after training: the run had no " + (
            "evaluation that early." if first else "`evaluation_interval`."
        )
    last = headline(evaluated[-1]["evaluation"])
    step = evaluated[-1]["training_iteration"]
    after = f"{format_pass_at_1(last)} % after {step} steps"
    if first is None:
        return f"Held-out pass@1: {after}."
    gain = 100 * (last["pass_at_1"] - first["pass_at_1"])
    return (
        f"Held-out pass@1: {format_pass_at_1(first)} % before, {after}: "
        f"{gain:+.1f} points."
    )
