"""The report: its charts, what it reads, and the page in a real browser."""

import re
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_helpers import HOSTILE, make_run

from rllib_exgrpo.cli import main
from rllib_exgrpo.report.page import report_html
from rllib_exgrpo.report.runs import find_runs
from rllib_exgrpo.report.svg import (
    Line,
    Point,
    format_number,
    heat_map,
    line_chart,
    scatter,
    stacked_bars,
    thin,
    tick_labels,
    ticks,
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECTIONS = [
    "evaluation", "training", "replay", "ratios", "time", "prompts", "configuration",
]  # fmt: skip


# --- charts


def test_ticks_by_hand():
    assert ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(3, 97) == [0, 25, 50, 75, 100]
    assert ticks(0.012, 0.013) == [0.012, 0.01225, 0.0125, 0.01275, 0.013]
    assert ticks(5, 5) == [4.5, 4.75, 5, 5.25, 5.5]
    assert ticks(0, 0) == [0, 0.25, 0.5, 0.75, 1]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_enclose_the_range_in_even_steps(low, width):
    marks = ticks(low, low + width)
    steps = np.diff(marks)
    assert marks[0] <= low + 1e-6 * width
    assert marks[-1] >= low + width * (1 - 1e-6)
    assert 4 <= len(marks) <= 8
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)


def test_numbers_are_short():
    numbers = (0.123456, 25.0, 1234.5, 12340.0, 2.5e6, 3e9, float("nan"))
    shown = ["0.123", "25", "1,234", "12.34k", "2.5M", "3G", "-"]
    assert [format_number(n) for n in numbers] == shown


def test_tick_labels_differ():
    assert tick_labels([0.998, 1.0, 1.002]) == ["0.998", "1.000", "1.002"]
    assert tick_labels([0, 2.5, 5]) == ["0.0", "2.5", "5.0"]
    assert tick_labels([500, 1000, 1500]) == ["500", "1,000", "1,500"]
    assert tick_labels([0, 1e-5]) == ["0", "1e-05"]
    assert tick_labels([100_000, 102_500]) == ["100k", "102.5k"]


def test_thinning_averages_neighbours_and_ignores_gaps():
    xs, ys = np.arange(7.0), np.array([1.0, 3, np.nan, 5, np.nan, np.nan, 7])
    thin_xs, thin_ys = thin(xs, ys, 4)
    np.testing.assert_array_equal(thin_xs, [0.5, 2.5, 4.5, 6])
    np.testing.assert_array_equal(thin_ys, [2, 5, np.nan, 7])
    np.testing.assert_array_equal(thin(xs, ys, 7)[1], ys)


def test_a_gap_lifts_the_pen_and_labels_are_escaped():
    ys = np.array([0.0, 1.0, np.nan, 1.0, 0.0])
    svg = line_chart([Line("<b>", np.arange(5.0), ys)], "x & y", "a <title>")
    # Plane: x from 46 to 352, y from 166 (0) to 8 (1).
    assert "M46.0 166.0L122.5 8.0M275.5 8.0L352.0 166.0" in svg
    assert svg.count("<circle") == 4
    assert "x &amp; y" in svg
    assert 'aria-label="a &lt;title&gt;"' in svg
    assert "<b>" not in svg


def test_bars_stack_and_cells_shade():
    bars = stacked_bars(
        np.array([1.0, 2.0]), {"a": np.array([1.0, 1.0]), "b": np.array([1.0, np.nan])},
        "step", "t",
    )  # fmt: skip
    tops = [float(y) for y in re.findall(r' y="([\d.]+)" width', bars)]
    # 158 units for 2: "a" from 166 to 87 twice, "b" on top of the first only.
    assert tops == [87.0, 87.0, 8.0]
    cells = heat_map(np.array([1.0, 2.0]), {"a": np.array([0.2, 0.4])}, "step", "t")
    assert re.findall(r'fill-opacity="([\d.]+)"', cells) == ["0.5", "1"]
    assert "a: 40.0 %, step 2" in cells


# --- runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first")
    make_run(folder / "second", seed=1, replay_ratio=0.0)
    return folder


def test_runs_are_found_by_folder_and_all_trials_of_a_sweep(runs):
    assert [run.label for run in find_runs([runs / "first"])] == ["first"]
    found = find_runs([runs])
    assert [run.label for run in found] == ["first", "second"]
    scores = [run.held_out["pass_at_1"] for run in found]
    assert scores == sorted(scores, reverse=True)  # best first
    both = [run.label for run in find_runs([runs, runs / "second"])]
    assert both == [f"{runs.name}/first", f"{runs.name}/second", "second"]
    with pytest.raises(ValueError, match="no result.json"):
        find_runs([runs / "nothing"])


def test_series_have_a_value_for_each_step(runs):
    (run,) = find_runs([runs / "first"])
    np.testing.assert_array_equal(run.steps, np.arange(1, 25))
    ratios = run.series("learners/default_policy/importance_ratio_replayed_mean")
    assert np.isnan(ratios[0])
    assert np.isnan(run.series("no/such/metric")).all()
    assert set(run.evaluations) == {"evaluation", "hard"}


def test_a_run_without_evaluation_has_a_report_too(runs, tmp_path):
    folder = make_run(tmp_path / "short", num_steps=3)
    shutil.rmtree(folder / "trial" / "evaluation")
    (run,) = find_runs([folder])
    assert "This run kept no completions" in report_html([run], "short")


def test_model_text_is_escaped_and_several_runs_overlay(runs):
    html = report_html(find_runs([runs / "first", runs / "second"]), "both")
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;document.title" in html
    assert "<td>replay_ratio</td><td>0.5</td><td>0.0</td>" in html
    assert "first, in the buffer: " in html  # of its points
    assert html.count('"--pen:var(--c1)">second</li>') == 1  # one legend for all charts
    assert "<th>replay_ratio</th>" in html[: html.index("<nav>")]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Eleven trials, one of which failed before its first step."""
    folder = tmp_path_factory.mktemp("sweep")
    for i in range(11):
        settings = {"lr": 10.0 ** (-6 + i / 4), "replay_buffer_config": {"sigma": i}}
        make_run(folder / str(i), num_steps=8, seed=i, **settings)
        (folder / str(i) / "trial").rename(folder / f"trial_{i}")
    (folder / "trial_3" / "result.json").write_text("")
    return folder


def test_a_sweep_shows_its_trials_best_first_and_what_was_varied(sweep):
    assert main(["report", str(sweep)]) == 0
    html = (sweep / "report.html").read_text()
    assert f"<h1>{sweep.name}: 10 runs</h1>" in html
    head = html[: html.index("<nav>")]
    trials = re.findall(r"<td>(trial_\d+)</td>", head)
    scores = [float(text) for text in re.findall(r"\] %</td><td>([\d.]+) \[", head)]
    assert len(trials) == 10
    assert "trial_3" not in trials
    assert scores == sorted(scores, reverse=True)
    assert "<th>replay_buffer_config/sigma</th>" in head
    # A learning rate from 1e-6 to 10^-3.5 gets a logarithmic axis, sigma an even one.
    by_lr = html[html.index("by lr") :]
    by_lr = by_lr[: by_lr.index("</figure>")]
    for tick in ("1e-06", "1e-05", "0.0001"):
        assert f">{tick}</text>" in by_lr
    assert by_lr.count("<circle") == 10
    assert "Held-out pass@1 by replay_buffer_config/sigma" in html
    # Seven colours of their own, and one for the rest.
    assert ">3 others</li>" in html
    assert html.count("Pass rate of the prompts: trial_") == 2 * 4  # and for the blind
    assert "For the other 6: rllib report FOLDER." in html


def test_points_by_hand():
    nan = float("nan")
    points = [Point("a", 1.0, 50.0, 40.0, 60.0), Point("b", 100.0, 70.0, nan, nan, 2)]
    chart = scatter(points, "lr", "title")
    # Two decades and margins of a twentieth; 306 units wide from 46.
    assert 'cx="59.9" cy="' in chart
    assert 'cx="338.1"' in chart
    assert chart.count('class="line"') == 1
    assert "<title>b: 70 at 100</title>" in chart
    assert [f">{tick}</text>" in chart for tick in ("1", "10", "100")] == [True] * 3
    assert ">1.4</text>" in scatter([Point("a", 1.5, 1, nan, nan)], "x", "t")


def test_what_was_replayed_last_is_shown_the_hardest_first(runs, tmp_path):
    html = report_html(find_runs([runs / "first"]), "first")
    audit = html[html.index("Replay audit") :]
    assert "Step 23 replayed 2 completions, each chosen by lowest_entropy" in audit
    cells = re.findall("<td>(.*?)</td>", audit[audit.index("&quot;easy") - 9 :])
    assert cells[1:7] == ["6", "8", "0.4 %", "0.120", "0.250", "1 of 3"]
    assert audit.index("Injected") < audit.index("easy")
    folder = make_run(tmp_path / "on_policy", num_steps=3)
    shutil.rmtree(folder / "trial" / "replay_audit")
    assert "This run has replayed nothing" in report_html(
        find_runs([folder]), "on_policy"
    )


# --- in a browser


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium is installed")
    return path


def open_page(browser, page, profile, width=1200):
    """Returns the page's DOM after loading, and what the browser's console says."""
    process = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
            "--enable-logging=stderr", f"--user-data-dir={profile}",
            f"--window-size={width},900", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    console = [n for n in process.stderr.splitlines() if ":CONSOLE" in n]
    return process.stdout, console


def test_the_page_opens_whole_and_asks_for_nothing(browser, runs, tmp_path):
    report = tmp_path / "report.html"
    assert main(["report", str(runs / "first"), "--output", str(report)]) == 0
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    dom, console = open_page(browser, report, tmp_path / "profile")
    assert console == []
    assert re.findall(r'<section id="(\w+)">', dom) == SECTIONS
    assert dom.count("<figure>") == dom.count("<svg")
    assert dom.count("<figure>") > 15
    assert not re.findall(r'(?:src|href)="(?!#)', dom)
    assert "<title>first</title>" in dom
    assert "Injected</h2>" not in dom


def test_the_pages_policy_refuses_what_it_should(browser, runs, tmp_path):
    # The control of the test above: were a text not escaped, the console would tell.
    html = report_html(find_runs([runs / "first"]), "first")
    page = tmp_path / "broken.html"
    page.write_text(html.replace("</h1>", f"</h1>{HOSTILE}", 1))
    dom, console = open_page(browser, page, tmp_path / "profile")
    assert "<title>first</title>" in dom  # the script did not run
    assert sum("Content Security Policy" in line for line in console) >= 2
