"""Compare two runs, or two sides of several runs, question by question.

The difference of pass@1 is taken on the questions that all runs share, so that hard and
easy questions do not blur it. Its 95 % interval comes from resampling the questions of
each source and, where a side has several runs, those too:

    rllib compare RUN_A RUN_B
    rllib compare A_SEED_0 A_SEED_1 vs B_SEED_0 B_SEED_1
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rllib_exgrpo.cli._errors import as_command_error

if TYPE_CHECKING:
    from rllib_exgrpo.evaluation.questions import Question

_SEPARATOR = "vs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rllib compare`."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run's folder, or a file of `rllib evaluate --questions`; with more "
        f"than two, put `{_SEPARATOR}` between the sides",
    )
    parser.add_argument("--set", metavar="NAME", help="only this evaluation set")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="the evaluation after so many steps (default: each run's last)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `rllib compare`."""
    from rllib_exgrpo.cli._tables import comparison_lines
    from rllib_exgrpo.evaluation.compare import compare

    with as_command_error("the runs cannot be compared"):
        paths_a, paths_b = _sides(args.runs)
        side_a, side_b = (
            [_read(path, args.step) for path in paths] for paths in (paths_a, paths_b)
        )
        shared = [
            name
            for name in side_a[0]
            if args.set in (None, name)
            and all(name in run for run in [*side_a, *side_b])
        ]
        if not shared:
            raise ValueError(
                f"they share no evaluation set; the first has {', '.join(side_a[0])}."
            )
        found = {
            name: compare([r[name] for r in side_a], [r[name] for r in side_b])
            for name in shared
        }
    for letter, paths, side in (("A", paths_a, side_a), ("B", paths_b, side_b)):
        for path, questions in zip(paths, side, strict=True):
            step = questions[shared[0]][0].iteration
            print(f"{letter}  {path}, after {step} steps")
    print("\npass@1, in per cent:\n", *comparison_lines(found), sep="\n")
    return 0


def _sides(runs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments into the two sides."""
    if len(runs) == 2 and _SEPARATOR not in runs:
        return [runs[0]], [runs[1]]
    middle = runs.index(_SEPARATOR) if runs.count(_SEPARATOR) == 1 else 0
    if not 0 < middle < len(runs) - 1:
        raise ValueError("give two runs, or more with `vs` between the two sides.")
    return list(runs[:middle]), list(runs[middle + 1 :])


def _read(path: str, step: int | None) -> "dict[str, list[Question]]":
    """Reads one evaluation of a run, by evaluation set."""
    from rllib_exgrpo.evaluation.questions import by_set, latest, read_questions

    questions = read_questions(path)
    steps = sorted({q.iteration for q in questions})
    if not steps:
        raise ValueError(f"{path} holds no results of evaluations.")
    if step is None:
        return by_set(latest(questions))
    if step not in steps:
        raise ValueError(
            f"--step is {step}; {path} was evaluated after {', '.join(map(str, steps))}"
            " steps."
        )
    return by_set(q for q in questions if q.iteration == step)
