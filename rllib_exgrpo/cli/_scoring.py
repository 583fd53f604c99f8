"""Judges rows of stored completions and sums the verdicts up."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rllib_exgrpo.envs import Reason, Verdict
from rllib_exgrpo.envs.verifier_pool import VerifierPool

_ROWS_AT_A_TIME = 4096
_AMBIGUOUS = "ambiguous"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns; a dot enters a struct."""

    gold: str
    completion: str
    correct: str
    source: str


def read_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of a JSON-lines or parquet file, a part at a time.

    Raises:
        ValueError: for another kind of file, or a line that is no JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError("there is no such file.")
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(path).iter_batches(_ROWS_AT_A_TIME):
            yield from batch.to_pylist()
        return
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError("it must be a .jsonl or a .parquet file.")
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            yield _parse(line, number)


def score(
    rows: Iterator[Row], columns: Columns, pool: VerifierPool
) -> Iterator[tuple[Row, Verdict]]:
    """Judges rows in order.

    Raises:
        ValueError: if a row lacks the gold answer or the completion.
    """
    numbered = enumerate(rows, 1)
    while part := list(islice(numbered, _ROWS_AT_A_TIME)):
        golds = [_required(row, columns.gold, number) for number, row in part]
        completions = [
            _required(row, columns.completion, number) for number, row in part
        ]
        verdicts = pool.verify_many(golds, completions)
        yield from zip([row for _, row in part], verdicts, strict=True)


@dataclass
class Tally:
    """How many verdicts there are, by reason, and how many agree with `correct`."""

    reasons: Counter[str] = field(default_factory=Counter)
    labelled: int = 0
    right: int = 0

    def accuracy(self) -> str:
        """The share that agrees, in words."""
        share = f"{self.right / self.labelled:.1%}" if self.labelled else "no label"
        return f"{self.right} of {self.labelled} as labelled ({share})"


@dataclass
class Summary:
    """What `rllib verify` prints."""

    clear: Tally = field(default_factory=Tally)
    ambiguous: Tally = field(default_factory=Tally)
    by_source: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    confusion: Counter[tuple[str, bool]] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def add(self, columns: Columns, row: Row, verdict: Verdict) -> None:
        """Counts a row."""
        is_ambiguous = bool(row.get(_AMBIGUOUS))
        source = str(_dig(row, columns.source, ""))
        correct = _dig(row, columns.correct, None)
        total = self.ambiguous if is_ambiguous else self.clear
        for tally in (total, self.by_source[source]):
            tally.reasons[verdict.reason] += 1
            if correct is not None:
                tally.labelled += 1
                tally.right += (verdict.reward >= 1.0) == bool(correct)
        if correct is not None and not is_ambiguous:
            self.confusion[verdict.reason, bool(correct)] += 1
        self.seconds.append(verdict.seconds)

    def text(self, wall_seconds: float) -> str:
        """Returns the summary as lines for people."""
        count = len(self.seconds)
        timeouts = sum(t.reasons[Reason.TIMEOUT] for t in (self.clear, self.ambiguous))
        lines = [
            f"{count} answers in {wall_seconds:.1f} s: "
            f"{count / max(wall_seconds, 1e-9):,.0f} a second, {timeouts} time-outs, "
            f"the slowest {max(self.seconds, default=0.0):.2f} s."
        ]
        if self.clear.labelled:
            lines.append(f"Accuracy: {self.clear.accuracy()}.")
        if self.ambiguous.reasons:
            lines.append(f"Ambiguous, counted apart: {self.ambiguous.accuracy()}.")
        lines += ["", *self._reason_lines()]
        if len(self.by_source) > 1:
            lines += ["", *self._source_lines()]
        return "\n".join(lines)

    def _reason_lines(self) -> Iterator[str]:
        reasons = self.clear.reasons + self.ambiguous.reasons
        heads = [
            "rows",
            "correct",
            "not",
            *["ambiguous"] * bool(self.ambiguous.reasons),
        ]
        yield "".join([f"{'reason':16}", *(f"{head:>10}" for head in heads)])
        for reason, rows in reasons.most_common():
            counts = [rows, *(self.confusion[reason, label] for label in (True, False))]
            counts.append(self.ambiguous.reasons[reason])
            cells = (f"{count:>10}" for count in counts[: len(heads)])
            yield "".join([f"{reason!s:16}", *cells])

    def _source_lines(self) -> Iterator[str]:
        for source, tally in sorted(self.by_source.items()):
            ok, total = tally.reasons[Reason.OK], tally.reasons.total()
            yield f"{source or '(no source)'}: {ok} of {total} ok; {tally.accuracy()}"


def output_line(row: Row, verdict: Verdict) -> str:
    """Returns a row with its verdict as a line of JSON; no reward is null."""
    judged = {
        "reward": verdict.reward if verdict.is_known else None,
        "reason": str(verdict.reason),
        "message": verdict.message,
        "seconds": round(verdict.seconds, 4),
    }
    return json.dumps({**row, **judged}, default=str) + "\n"


@contextmanager
def written_whole(path: str | None) -> Iterator[TextIO | None]:
    """Opens a file that has its name only once it is complete; None opens none."""
    if path is None:
        yield None
        return
    partial = Path(f"{path}.partial")
    try:
        with partial.open("w") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _parse(line: str, number: int) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"line {number} is not JSON: {error.msg} at character {error.pos + 1}."
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f"line {number} is no JSON object.")
    return row


_MISSING = object()


def _required(row: Row, dotted: str, number: int) -> Any:
    value = _dig(row, dotted, _MISSING)
    if value is _MISSING:
        raise ValueError(
            f"row {number} has no {dotted!r}; it has {sorted(row)}. Mend the row, or "
            "name the column with --gold-column or --completion-column if all rows "
            "call it something else."
        )
    return value


def _dig(row: Row, dotted: str, default: Any) -> Any:
    value: Any = row
    for key in [dotted] if dotted in row else dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value
