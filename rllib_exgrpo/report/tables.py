"""The tables and texts of a report. Whatever a model or user wrote is escaped."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from rllib_exgrpo.evaluation.examples import Example
from rllib_exgrpo.evaluation.metrics import headline, metric_sources
from rllib_exgrpo.metric_names import value_of
from rllib_exgrpo.report.runs import Run, varied_settings

_MAX_CHARS = 6000  # of a prompt or completion
_MAX_AUDIT_ROWS = 40
_MAX_SETTINGS = 6  # in the table of runs
_RLLIBS_OWN = ("_", "callbacks", "offline", "policies", "output", "input", "multiagent")


def summary(runs: Sequence[Run]) -> str:
    """Tells each run in a row, with the settings that differ between them."""
    varied = dict(list(varied_settings(runs).items())[:_MAX_SETTINGS])
    header = ["run", "held-out before", "after", *varied]
    rows = [
        _summary_row(run, [_brief(values[r]) for values in varied.values()])
        for r, run in enumerate(runs)
    ]
    return _by_run([*header, "steps", "completions", "time"], rows, runs)


def _brief(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else _as_text(value)[:40]


def _summary_row(run: Run, settings: Sequence[str]) -> list[str]:
    first, last = run.results[0], run.results[-1]
    completions = value_of(last, "env_runners/num_env_steps_sampled_lifetime")
    return [
        run.label,
        percent(headline(first.get("evaluation_at_start", {})), "pass_at_1"),
        percent(run.held_out, "pass_at_1"),
        *settings,
        f"{last['training_iteration']:,}",
        f"{completions:,.0f}",
        f"{last['time_total_s'] / 60:,.1f} min",
    ]


def evaluations(runs: Sequence[Run]) -> str:
    """Tells the latest evaluation of each run, set and source in a row."""
    rows, sizes = [], set()
    for run in runs:
        for name, metrics in run.evaluations.items():
            size = int(metrics["samples_per_prompt"])
            sizes.add(size)
            for source in ("", *metric_sources(metrics)):
                cells = _row(metrics, source, size)
                rows.append([run.label, name, source or "all", *cells])
    k = sizes.pop() if len(sizes) == 1 else "k"
    header = ["run", "set", "source", "questions", "pass@1", f"pass@{k}", f"maj@{k}",
              "length", "truncated", "format"]  # fmt: skip
    if k == 1:  # these two say nothing more
        header, *rows = ([*row[:5], *row[7:]] for row in (header, *rows))
    return _by_run(header, rows, runs)


def _by_run(
    header: Sequence[str], rows: Sequence[Sequence[str]], runs: Sequence[Run]
) -> str:
    """Returns a table without its first column, the run's name, if there is one run."""
    first = 0 if len(runs) > 1 else 1
    return table(header[first:], [row[first:] for row in rows])


def _row(metrics: Mapping[str, Any], source: str, size: int) -> Iterable[str]:
    end = f"_of_{source}" if source else ""
    yield f"{metrics[f'num_prompts{end}']:,.0f}"
    for name in ("pass_at_1", f"pass_at_{size}", f"maj_at_{size}"):
        yield percent(metrics, name, end)
    yield f"{metrics[f'completion_length_mean{end}']:,.1f}"
    for name in ("truncated_fraction", "format_fraction"):
        yield f"{100 * metrics[name + end]:.1f} %"


def percent(metrics: Mapping[str, Any], name: str, end: str = "") -> str:
    """Returns a share with its interval in per cent; a dash if it is not there."""
    if name + end not in metrics:
        return "-"
    value, low, high = (
        100 * metrics.get(f"{name}{part}{end}", float("nan"))
        for part in ("", "_low", "_high")
    )
    return f"{value:.1f} [{low:.1f}, {high:.1f}] %"


def examples(run: Run) -> str:
    """Shows the worst and the best prompts of the latest evaluation."""
    if not run.examples:
        return '<p class="empty">This run kept no completions.</p>'
    parts = []
    for name, of_set in groupby(run.examples, key=lambda e: e.evaluation_set):
        chosen = list(of_set)
        parts.append(
            f"<h4>{escape(name)}, after {chosen[0].iteration:,} steps, worst first</h4>"
        )
        for _, of_prompt in groupby(chosen, key=lambda e: e.prompt_id):
            parts.append(_prompt(list(of_prompt)))
    return "".join(parts)


def _prompt(chosen: Sequence[Example]) -> str:
    first = chosen[0]
    completions = "".join(_completion(example) for example in chosen)
    head = f"{first.num_correct} of {first.num_samples} right"
    source = f" · {first.source}" if first.source else ""
    brief = " ".join(first.prompt.split())[:80]
    return (
        f"<details><summary><b>{head}</b>{escape(source)} · {escape(brief)}</summary>"
        f"<pre>{_clipped(first.prompt)}</pre>{completions}</details>"
    )


def _completion(example: Example) -> str:
    mark = "right" if example.reward >= 1 else "wrong"
    cut = ", truncated" if example.truncated else ""
    about = (
        f"reward {example.reward:g} ({example.reason}), {example.num_tokens:,} "
        f"tokens{cut}"
    )
    text = _clipped(example.completion)
    return f'<p class="{mark}">{escape(about)}</p><pre>{text}</pre>'


def _clipped(text: str) -> str:
    rest = len(text) - _MAX_CHARS
    if rest > 0:
        half = _MAX_CHARS // 2
        text = f"{text[:half]}\n[... {rest:,} characters left out ...]\n{text[-half:]}"
    return escape(text)


def replay_audit(run: Run) -> str:
    """Shows what the latest step replayed and why, the hardest prompts first."""
    if not run.replayed:
        return '<p class="empty">This run has replayed nothing.</p>'
    header = ("prompt", "correct before", "then", "chance of a draw", "score",
              "mean of candidates", "rank", "age", "tokens", "mean ratio",
              "saturated")  # fmt: skip
    rows = sorted(run.replayed, key=lambda row: row["bucket"])
    first = rows[0]
    about = (
        f"Step {first['iteration']:,} replayed {len(rows):,} completions, each chosen "
        f"by {first['rule']}. Score: in nats a token; rank 1 is the lowest. "
        "`rllib replay audit` tells of every step."
    )
    shown = table(header, map(_audit_row, rows[:_MAX_AUDIT_ROWS]))
    left_out = len(rows) - _MAX_AUDIT_ROWS
    rest = f'<p class="empty">{left_out:,} more.</p>' if left_out > 0 else ""
    return f"<h4>Replay audit</h4><p>{escape(about)}</p>{shown}{rest}"


def _audit_row(row: Mapping[str, Any]) -> list[str]:
    rank = row["rank"] or "-"
    return [
        row["prompt_id"],
        str(row["bucket"]),
        str(row["correct"]),
        f"{100 * row['probability']:.2g} %",
        _or_dash(row["score"]),
        _or_dash(row["mean_score"]),
        f"{rank} of {row['candidates']}",
        str(row["age"]),
        f"{row['tokens']:,}",
        _or_dash(row["importance_ratio"]),
        f"{100 * row['saturated']:.0f} %" if row["tokens"] else "-",
    ]


def _or_dash(value: float) -> str:
    return "-" if value != value else f"{value:.3f}"


def configuration(runs: Sequence[Run]) -> str:
    """Lists the settings, those that differ between the runs first, and versions."""
    labels = [run.label for run in runs]
    varied = varied_settings(runs)
    different = [[path, *map(_as_text, values)] for path, values in varied.items()]
    equal = [
        row[:2]
        for row in _rows([run.config for run in runs])
        if len(set(row[1:])) == 1 and not row[0].startswith(_RLLIBS_OWN)
    ]
    versions = _rows([run.versions for run in runs])
    parts = [
        f"<h4>Versions</h4>{table(('package', *labels), versions)}",
        f"<details><summary>{len(equal)} settings</summary>",
        f"{table(('setting', 'value'), equal)}</details>",
    ]
    if different:
        head = "<h4>Settings that differ</h4>"
        parts.insert(0, head + table(("setting", *labels), different))
    return "".join(parts)


def _rows(columns: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns name and values of what several dicts hold, as text."""
    names = sorted({name for column in columns for name in column})
    return [[n, *(_as_text(column.get(n, "")) for column in columns)] for n in names]


def _as_text(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns an HTML table that scrolls where the screen is too narrow."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
