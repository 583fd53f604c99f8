"""Write the report of one or several runs: one HTML file that needs no network.

It holds learning curves with intervals, the buffer, ratios, times, prompts with
completions, and the configuration. The folder of a sweep gives a report of all trials.
"""

import argparse
from pathlib import Path

from rllib_exgrpo.cli._errors import as_command_error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rllib report`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--output",
        metavar="FILE.html",
        help="the report; the learning curve goes beside it as a PNG (default: "
        "report.html in the folder of the run or, for several, in the present one)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `rllib report`."""
    from rllib_exgrpo.report.page import write_report

    place = Path(args.runs[0]) if len(args.runs) == 1 else Path()
    output = args.output or place / "report.html"
    with as_command_error("the report cannot be written"):
        for path in write_report(args.runs, output):
            print(path)
    return 0
