"""Check the installation, and whether this machine suits an experiment.

Without FILE the installation alone is checked. Each line is ok, a warning or an error,
with the remedy. The exit code is 1 if there is an error. No engine is started.
"""

import argparse
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rllib_exgrpo.cli._errors import CommandError

if TYPE_CHECKING:  # not imported yet, so that --help need not wait for RLlib
    from rllib_exgrpo.cli._checks import Finding
    from rllib_exgrpo.cli._experiment import Experiment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rllib doctor`."""
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="an experiment, as for `rllib train`"
    )
    parser.add_argument(
        "--storage-path",
        default="results",
        metavar="FOLDER",
        help="where results would go (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `rllib doctor`."""
    from rllib_exgrpo.cli._experiment import Experiment
    from rllib_exgrpo.cli._ray import quieten

    quieten()
    experiment = Experiment.from_file(args.file) if args.file else None
    levels = []
    for finding in _findings(experiment, Path(args.storage_path)):
        print(_text(finding), flush=True)
        levels.append(finding.level)
    errors, warnings = levels.count("error"), levels.count("warning")
    print(f"\n{errors} error(s), {warnings} warning(s).")
    return 1 if errors else 0


def _findings(experiment: "Experiment | None", storage: Path) -> Iterator["Finding"]:
    from rllib_exgrpo.cli import _checks as checks
    from rllib_exgrpo.cli import _experiment_checks as experiment_checks

    yield checks.versions()
    yield checks.build()
    yield checks.threads()
    yield checks.compiled_extensions()
    yield checks.storage(storage)
    yield checks.wandb()
    if experiment is None:
        return
    try:
        experiment = experiment.checked()
    except CommandError as error:
        yield checks.Finding("error", "experiment", str(error))
        return
    yield checks.Finding("ok", "experiment", "settings and prompts can be used")
    yield from experiment_checks.all_of(next(experiment.variants()), storage)


def _text(finding: "Finding") -> str:
    label = f"{finding.level:<8} {finding.subject:<13} "
    return textwrap.fill(
        f"{finding.text} {finding.remedy}",
        88,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
