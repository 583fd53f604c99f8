"""Judge stored completions again, with the maths verifier.

Reads JSON lines or parquet with a gold answer and a completion in each row, writes a
verdict with its reason for each, and prints how far they agree with the column
`correct`, where there is one. Rows marked `ambiguous` are counted apart.

Example:
    rllib verify answers.jsonl --output verdicts.jsonl
"""

import argparse
import time
from pathlib import Path

from rllib_exgrpo.cli._errors import as_command_error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rllib verify`."""
    parser.add_argument("file", metavar="FILE", help="a .jsonl or .parquet file")
    parser.add_argument(
        "--output",
        metavar="FILE.jsonl",
        help="write each row with `reward`, `reason`, `message` and `seconds`",
    )
    for role in ("gold", "completion", "correct", "source"):
        parser.add_argument(
            f"--{role}-column",
            default=role,
            metavar="NAME",
            help="a dot enters a struct (default: %(default)s)",
        )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="wall time for one answer (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: one a CPU)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs `rllib verify`."""
    from rllib_exgrpo.cli._scoring import (
        Columns,
        Summary,
        output_line,
        read_rows,
        score,
        written_whole,
    )
    from rllib_exgrpo.envs.math_pool import MathVerifierPool

    columns = Columns(
        args.gold_column,
        args.completion_column,
        args.correct_column,
        args.source_column,
    )
    summary = Summary()
    start = time.perf_counter()
    with (
        as_command_error(f"{args.file} cannot be judged"),
        MathVerifierPool(args.workers, args.time_limit) as pool,
        written_whole(args.output) as output,
    ):
        for row, verdict in score(read_rows(Path(args.file)), columns, pool):
            summary.add(columns, row, verdict)
            if output is not None:
                output.write(output_line(row, verdict))
    print(summary.text(time.perf_counter() - start))
    return 0
