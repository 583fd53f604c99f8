"""Puts a report together: one HTML file with its style, charts and texts inside."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from rllib_exgrpo.learning_curve import save_plot
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.report import tables
from rllib_exgrpo.report.charts import (
    SECTIONS,
    bucket_figure,
    curve_of,
    learning_curve_figures,
    metric_figure,
    runs_legend,
    setting_figures,
    time_figure,
)
from rllib_exgrpo.report.runs import Run, find_runs

_MAX_DETAILED = 4  # runs with charts and texts of their own

# The policy makes the browser itself refuse scripts and everything from elsewhere.
_HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
"""

_STYLE = """\
:root { --back: #fff; --card: #f6f8fa; --ink: #1f2328; --muted: #59636e;
  --edge: #d1d9e0; --right: #1a7f37; --wrong: #cf222e;
  --c0: #0969da; --c1: #cf5c00; --c2: #1a7f37; --c3: #8250df;
  --c4: #bf3989; --c5: #9a6700; --c6: #0a7ea4; --c7: #8c959f; }
@media (prefers-color-scheme: dark) {
  :root { --back: #0d1117; --card: #161b22; --ink: #e6edf3; --muted: #9198a1;
    --edge: #30363d; --right: #3fb950; --wrong: #f85149;
    --c0: #58a6ff; --c1: #f0883e; --c2: #3fb950; --c3: #bc8cff;
    --c4: #f778ba; --c5: #d29922; --c6: #39c5cf; --c7: #6e7681; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 16px; background: var(--back);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5em; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2em; margin: 32px 0 8px; border-bottom: 1px solid var(--edge); }
h3, h4 { font-size: 1em; margin: 16px 0 6px; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 8px 0 16px; }
a { color: var(--c0); text-decoration: none; }
.grid { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; padding: 10px 12px; background: var(--card);
  border: 1px solid var(--edge); border-radius: 8px; }
figcaption { font-weight: 600; margin-bottom: 4px; }
figcaption small, figure p { color: var(--muted); font-weight: 400; font-size: 13px; }
figure p { margin: 6px 0 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--muted); font: 11px system-ui, sans-serif; }
.grid-line { stroke: var(--edge); stroke-width: 1; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.band { opacity: .18; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; list-style: none;
  margin: 6px 0 0; padding: 0; font-size: 13px; }
.legend li { overflow-wrap: anywhere; }
.legend li::before { content: ""; display: inline-block; width: 18px; margin-right: 6px;
  vertical-align: 4px; border-top: 3px solid var(--pen); }
.legend .d1::before { border-top-style: dashed; }
.legend .d2::before, .legend .d3::before { border-top-style: dotted; }
.runs { position: sticky; top: 0; z-index: 1; max-height: 96px; overflow-y: auto;
  padding: 6px 0; background: var(--back); border-bottom: 1px solid var(--edge); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 4px 12px 4px 0; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--edge); font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 500; }
details td { white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
details { border: 1px solid var(--edge); border-radius: 8px; margin: 6px 0;
  padding: 6px 12px; background: var(--card); }
summary { cursor: pointer; overflow-wrap: anywhere; }
pre { margin: 6px 0; padding: 8px; background: var(--back); border-radius: 6px;
  border: 1px solid var(--edge); white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12px/1.45 ui-monospace, monospace; }
.right, .wrong { margin: 10px 0 0; font-size: 13px; font-weight: 600; }
.right { color: var(--right); }
.wrong { color: var(--wrong); }
@media (max-width: 600px) { body { padding: 10px; } th, td { padding-right: 9px; } }
.empty, footer { color: var(--muted); }
footer { margin: 32px 0 8px; font-size: 13px; }
"""


def write_report(paths: Sequence[str | Path], output: str | Path) -> list[Path]:
    """Writes the report of runs, and the main learning curve as a PNG beside it.

    Args:
        paths: folders of runs, or of sweeps.
        output: of the HTML file, which is replaced in one go.

    Returns:
        The files written.

    Raises:
        ValueError: for a folder without a run, or without a finished step.
    """
    runs, output = find_runs(paths), Path(output)
    names = [Path(path).resolve().name for path in paths]
    if len(runs) > len(paths):
        names[-1] += f": {len(runs)} runs"
    html = report_html(runs, ", ".join(names)).encode()
    Folder.at(output.parent).write(output.name, lambda sink: sink.write(html))
    curves = [curve for run in runs if (curve := curve_of(run)) is not None]
    if not curves:
        return [output]
    return [output, save_plot(curves, output.with_suffix(".png"))]


def report_html(runs: Sequence[Run], title: str) -> str:
    """Returns the report of one or several runs as HTML."""
    title = escape(title)
    sections = list(_sections(runs))
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name, _ in sections)
    body = "".join(
        f'<section id="{_anchor(name)}"><h2>{name}</h2>{content}</section>'
        for name, content in sections
    )
    return (
        f"{_HEAD}<title>{title}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>{tables.summary(runs)}<nav>{links}</nav>"
        f"{runs_legend(runs) if len(runs) > 1 else ''}{body}"
        "<footer>Hover over a point for its value. Intervals are 95 % bootstrap "
        "intervals over the questions.</footer>\n</body>\n</html>\n"
    )


def _sections(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    several = len(runs) > 1
    if any(run.evaluations for run in runs):
        curves = _grid([*learning_curve_figures(runs), *setting_figures(runs)])
        yield "Evaluation", f"{curves}<h3>Latest</h3>{tables.evaluations(runs)}"
    detailed = runs[:_MAX_DETAILED]
    own = {
        "Replay": [bucket_figure(run, several) for run in detailed],
        "Time": [time_figure(run, several) for run in detailed],
    }
    for name, charts in SECTIONS.items():
        figures = [metric_figure(chart, runs) for chart in charts]
        audit = _of_each(runs, tables.replay_audit) if name == "Replay" else ""
        yield name, _grid([*own.get(name, ()), *figures]) + audit
    yield "Prompts", _of_each(runs, tables.examples)
    yield "Configuration", tables.configuration(runs)


def _of_each(runs: Sequence[Run], text: Callable[[Run], str]) -> str:
    """Joins what there is to say of the first runs, under their names if several."""
    several, left_out = len(runs) > 1, len(runs) - _MAX_DETAILED
    rest = f'<p class="empty">For the other {left_out:,}: rllib report FOLDER.</p>'
    return "".join(
        f"<h3>{escape(run.label)}</h3>" * several + text(run)
        for run in runs[:_MAX_DETAILED]
    ) + rest * (left_out > 0)


def _grid(figures: Sequence[str] | Iterator[str]) -> str:
    return f'<div class="grid">{"".join(figures)}</div>'


def _anchor(name: str) -> str:
    return name.lower()
