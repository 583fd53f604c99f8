"""Draw the learning curves of one or several runs into one picture."""

import argparse
from pathlib import Path

from rllib_exgrpo.cli._errors import as_command_error
from rllib_exgrpo.learning_curve import LearningCurve, read_results, save_plot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rllib plot`."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's folder, or its result.json"
    )
    parser.add_argument(
        "--labels", nargs="+", metavar="TEXT", help="names in the legend, one a run"
    )
    parser.add_argument(
        "--output",
        default="learning_curve.png",
        metavar="FILE.png",
        help="the picture (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `rllib plot`."""
    labels = args.labels or [Path(path).name for path in args.runs]
    with as_command_error("the runs cannot be drawn"):
        if len(labels) != len(args.runs):
            raise ValueError(f"{len(args.runs)} runs need as many `--labels`.")
        curves = [
            LearningCurve.from_results(read_results(path), label)
            for path, label in zip(args.runs, labels, strict=True)
        ]
        print(save_plot(curves, args.output))
    return 0
