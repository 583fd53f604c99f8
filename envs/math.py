"""Maths problems from verl-form parquet files, judged by math-verify."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from .base import Message, Problem, VerifiableTextEnv
from .math_verifier import prepare_gold, quick_verdict
from .verdict import Verdict
from .verifier_pool import VerifierPool

logger = logging.getLogger(__name__)

_MAX_LISTED_ROWS = 10
_COLUMN_SETTINGS = ("prompt_column", "answer_column", "source_column")
_COLUMN_TYPES = (
    (
        "prompt_column",
        r"(large_)?(string|list<.*(content.*role|role.*content))",
        "texts, or lists of chat messages with `role` and `content`",
    ),
    (
        "answer_column",
        r"(large_)?string|u?int|float|double|decimal",
        "texts or numbers",
    ),
)


class MathEnv(VerifiableTextEnv):
    r"""Asks maths problems whose answer goes into `\boxed{...}`.

    Rows with the same question and gold answer are one problem; its id is a hash of the
    question, so that it survives a reordering of the file.

    Settings:
        data: path of a parquet file, or a list of paths.
        prompt_column: chat messages (`role`, `content`), or a text.
        answer_column: the gold answer, a text or a number. A dot enters a struct.
        source_column: the data set's name, for metrics; None for none.
        split_column, split: keep only the rows whose column has this value.
        limit: keep only so many problems; None keeps all.
        on_bad_rows: "error" or "drop" rows without a question or a usable gold answer,
            and those that give one question different answers.
        verifier_workers: processes that judge answers; None means one a CPU.
        verifier_time_limit_s: wall time for one answer, after which it counts as
            unknown.
        verifier_memory_limit_bytes: address space of one of the processes.
    """

    settings: ClassVar = {
        "data": None,
        "prompt_column": "prompt",
        "answer_column": "reward_model.ground_truth",
        "source_column": "data_source",
        "split_column": "extra_info.split",
        "split": None,
        "limit": None,
        "on_bad_rows": "error",
        "verifier_workers": None,
        "verifier_time_limit_s": 5.0,
        "verifier_memory_limit_bytes": 2 << 30,
    }

    def load(self) -> list[Problem]:
        """Reads and checks the files.

        Raises:
            FileNotFoundError: for a missing file.
            ValueError: for missing columns, columns of a wrong type, or bad rows.
        """
        if self.config["on_bad_rows"] not in ("error", "drop"):
            raise ValueError(
                f"`on_bad_rows` is {self.config['on_bad_rows']!r}; take 'error' or "
                "'drop'."
            )
        problems: dict[str, Problem] = {}
        num_same = 0
        for path in self._paths():
            bad_rows: dict[str, list[int]] = {}
            for row, problem in self._read(path):
                fault = _fault(problem, problems)
                if fault:
                    bad_rows.setdefault(fault, []).append(row)
                elif problem.prompt_id in problems:
                    num_same += 1
                else:
                    problems[str(problem.prompt_id)] = problem
            self._report(path, bad_rows)
        logger.info(
            "MathEnv: %d problems; %d rows repeated one of them",
            len(problems),
            num_same,
        )
        return list(problems.values())[: self.config["limit"]]

    def verify(self, completion: str, problem: Problem) -> Verdict:
        """Judges the last box against the gold answer."""
        return self.verify_many([completion], [problem])[0]

    def verify_many(
        self, completions: Sequence[str], problems: Sequence[Problem]
    ) -> list[Verdict]:
        """Judges easy answers at once and the others in the pool, in order."""
        pending: list[Verdict | Future[Verdict]] = [
            quick_verdict(problem.answer, completion)
            or self._pool.submit(problem.answer, completion)
            for completion, problem in zip(completions, problems, strict=True)
        ]
        return [v if isinstance(v, Verdict) else v.result() for v in pending]

    def verifier_stats(self) -> dict[str, float]:
        """Returns the pool's counts by reason and its latencies in seconds."""
        return self._pool.stats()

    def close(self) -> None:
        """Ends the verifier's processes; they start again when needed."""
        pool = self.__dict__.pop("_pool", None)
        if pool is not None:
            pool.close()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_pool"}

    @cached_property
    def _pool(self) -> VerifierPool:
        return VerifierPool(
            self.config["verifier_workers"],
            self.config["verifier_time_limit_s"],
            self.config["verifier_memory_limit_bytes"],
        )

    def gold_completion(self, problem: Problem) -> str:
        """Puts the prepared gold answer into a box."""
        return rf"\boxed{{{prepare_gold(problem.answer)}}}"

    def _paths(self) -> list[Path]:
        data = self.config["data"]
        if not data:
            raise ValueError(
                "MathEnv needs the setting `data`: the path of a parquet file, or a "
                "list of paths."
            )
        paths = [Path(p) for p in ([data] if isinstance(data, str | Path) else data)]
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(
                    f"MathEnv: the setting `data` names {path}, which is not a file."
                )
        return paths

    def _read(self, path: Path) -> Iterator[tuple[int, Problem]]:
        """Yields row number and problem for each row of the split, unchecked."""
        import pyarrow.parquet as pq

        file = pq.ParquetFile(path)
        named = {name: self.config[name] for name in _COLUMN_SETTINGS}
        if self.config["split"] is not None:
            named["split_column"] = self.config["split_column"]
        named = {name: column for name, column in named.items() if column}
        _check_columns(path, file.schema_arrow, named)
        batches = file.iter_batches(columns=list(named.values()))
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows):
            values = {name: _dig(row, column) for name, column in named.items()}
            if values.get("split_column") == self.config["split"]:
                yield number, _problem(values)

    def _report(self, path: Path, bad_rows: dict[str, list[int]]) -> None:
        if not bad_rows:
            return
        summary = "; ".join(f"{f}: {_listed(rows)}" for f, rows in bad_rows.items())
        if self.config["on_bad_rows"] == "error":
            raise ValueError(
                f"{path} has rows that cannot be used. {summary}. Mend them, or set "
                "`on_bad_rows` to 'drop' to leave them out."
            )
        logger.warning("%s: rows left out. %s", path, summary)


def _problem(values: dict[str, Any]) -> Problem:
    prompt = values["prompt_column"]
    if isinstance(prompt, list):
        prompt = tuple({"role": m["role"], "content": m["content"]} for m in prompt)
    source = str(values.get("source_column") or "")
    return Problem(_question_id(prompt), prompt, values["answer_column"], source)


def _question_id(prompt: str | Sequence[Message] | None) -> str:
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]


def _fault(problem: Problem, earlier: dict[str, Problem]) -> str:
    """Names what makes a row unusable; empty if nothing does."""
    if not problem.prompt or not str(problem.text or "").strip():
        return "no question"
    if prepare_gold(problem.answer) is None:
        return "empty or unusable gold answer"
    known = earlier.get(str(problem.prompt_id))
    if known is not None and known.answer != problem.answer:
        return "another answer to a question asked before"
    return ""


def _listed(rows: list[int]) -> str:
    more = f" and {len(rows) - _MAX_LISTED_ROWS} more" * (len(rows) > _MAX_LISTED_ROWS)
    return f"{len(rows)} (rows {', '.join(map(str, rows[:_MAX_LISTED_ROWS]))}{more})"


def _dig(row: dict[str, Any], dotted: str) -> Any:
    if dotted in row:
        return row[dotted]
    value: Any = row
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _check_columns(path: Path, schema: Any, named: dict[str, str]) -> None:
    """Refuses a file that lacks a column, or has one of a type that cannot be used."""
    found = list(_column_types(schema))
    types = dict(found)
    missing = {name: column for name, column in named.items() if column not in types}
    if missing:
        wanted = ", ".join(f"{c!r} (setting `{n}`)" for n, c in missing.items())
        raise ValueError(
            f"{path} lacks {wanted}. It has the columns {[name for name, _ in found]}; "
            "name the right ones in the settings given in brackets."
        )
    _check_type(
        path, "prompt_column", named["prompt_column"], types, ("string", "list")
    )
    scalars = ("string", "int", "float", "double", "decimal")
    _check_type(path, "answer_column", named["answer_column"], types, scalars)


def _check_type(
    path: Path, setting: str, column: str, types: dict[str, str], good: tuple[str, ...]
) -> None:
    if not types[column].removeprefix("large_").startswith(good):
        raise ValueError(
            f"{path}: the column {column!r} (setting `{setting}`) holds "
            f"{types[column]}; it must hold one of {', '.join(good)}."
        )


def _column_types(fields: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted name and the type of each column, those in structs included."""
    from pyarrow import types

    for field in fields:
        name = prefix + field.name
        yield name, str(field.type)
        if types.is_struct(field.type):
            yield from _column_types(field.type, name + ".")
