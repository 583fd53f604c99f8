"""What the environments share that read their problems from files of rows."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from .base import Problem, VerifiableTextEnv

logger = logging.getLogger(__name__)

_MAX_LISTED_ROWS = 10
_TEXTS = (r"(large_)?string", "texts")
_PROMPTS = (
    r"(large_)?(string|list<.*(content.*role|role.*content))",
    "texts, or lists of chat messages with `role` and `content`",
)
_SCALARS = (r"(large_)?string|u?int|float|double|decimal", "texts or numbers")


class TableEnv(VerifiableTextEnv):
    """Reads its problems from parquet, JSON-lines or CSV files.

    Rows with the same question and gold answer are one problem; its id is a hash of the
    question, so that it survives a reordering of the file. A subclass writes `verify`,
    names its own columns in `column_settings`, and overrides `fault` and `to_problem`
    where its rows need it.

    Settings:
        data: path of a file, or a list of paths.
        prompt_column: chat messages (`role`, `content`), or a text.
        answer_column: the gold answer. A dot in a column's name enters a struct.
        source_column: the data set's name, for metrics; None for none.
        split_column, split: keep only the rows whose column has this value.
        limit: keep only so many problems; None keeps all.
        on_bad_rows: "error" or "drop" rows without a question or a usable gold answer,
            and those that give one question different answers.
    """

    settings: ClassVar = {
        "data": None,
        "prompt_column": "prompt",
        "answer_column": "answer",
        "source_column": None,
        "split_column": "split",
        "split": None,
        "limit": None,
        "on_bad_rows": "error",
    }

    column_settings: ClassVar[dict[str, tuple[str, str]]] = {
        "prompt_column": _PROMPTS,
        "answer_column": _SCALARS,
        "source_column": _TEXTS,
    }
    """The settings that name columns, with a pattern of the Arrow type and its name."""

    def to_problem(self, values: dict[str, Any]) -> Problem:
        """Makes a problem of a row; `values` is keyed by the names of the settings."""
        prompt = values["prompt_column"]
        if isinstance(prompt, list):
            prompt = tuple({"role": m["role"], "content": m["content"]} for m in prompt)
        source = str(values.get("source_column") or "")
        return Problem(question_id(prompt), prompt, values["answer_column"], source)

    def fault(self, problem: Problem) -> str:
        """Names what makes a problem unusable; empty if nothing does."""
        has_question = problem.prompt and str(problem.text or "").strip()
        return "" if has_question else "no question"

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
        problems: dict[Any, Problem] = {}
        num_same = 0
        for path in self._paths():
            bad_rows: dict[str, list[int]] = {}
            for row, problem in self._read(path):
                known = problems.setdefault(problem.prompt_id, problem)
                fault = self.fault(problem) or _contradiction(known, problem)
                if fault:
                    bad_rows.setdefault(fault, []).append(row)
                    if known is problem:
                        del problems[problem.prompt_id]
                num_same += known is not problem and not fault
            self._report(path, bad_rows)
        name = type(self).__name__
        logger.info(
            "%s: %d problems; %d rows repeated one", name, len(problems), num_same
        )
        return list(problems.values())[: self.config["limit"]]

    def _paths(self) -> list[Path]:
        data = self.config["data"]
        if not data:
            raise ValueError(
                f"{type(self).__name__} needs the setting `data`: the path of a "
                "parquet, JSON-lines or CSV file, or a list of paths."
            )
        paths = [Path(p) for p in ([data] if isinstance(data, str | Path) else data)]
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(
                    f"{type(self).__name__}: the setting `data` names {path}, which is "
                    "not a file."
                )
        return paths

    def _read(self, path: Path) -> Iterator[tuple[int, Problem]]:
        """Yields row number and problem for each row of the split, unchecked."""
        named = {name: self.config[name] for name in self.column_settings}
        if self.config["split"] is not None:
            named["split_column"] = self.config["split_column"]
        named = {name: column for name, column in named.items() if column}
        schema, read_batches = _open(path)
        _check_columns(path, schema, named, self.column_settings)
        batches = read_batches({column.split(".")[0] for column in named.values()})
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows):
            values = {name: _dig(row, column) for name, column in named.items()}
            if values.get("split_column") == self.config["split"]:
                yield number, self.to_problem(values)

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


def question_id(prompt: Any) -> str:
    """Returns a short hash of a prompt."""
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]


def _contradiction(known: Problem, problem: Problem) -> str:
    same = known.answer == problem.answer
    return "" if same else "another answer to a question asked before"


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


def _open(path: Path) -> tuple[Any, Callable[[set[str]], Iterable[Any]]]:
    """Returns a file's Arrow schema, and what reads its columns as record batches."""
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        file = ParquetFile(path)
        return file.schema_arrow, lambda columns: file.iter_batches(columns=[*columns])
    if path.suffix in (".jsonl", ".json"):
        from pyarrow.json import read_json as read
    elif path.suffix == ".csv":
        from pyarrow.csv import read_csv as read
    else:
        raise ValueError(f"{path} is no .parquet, .jsonl or .csv file.")
    table = read(path)
    return table.schema, lambda columns: table.to_batches()


def _check_columns(
    path: Path, schema: Any, named: dict[str, str], wanted: dict[str, tuple[str, str]]
) -> None:
    """Refuses a file that lacks a column, or has one of a type that cannot be used."""
    types = dict(_column_types(schema))
    missing = {name: column for name, column in named.items() if column not in types}
    if missing:
        lacks = ", ".join(f"{c!r} (setting `{n}`)" for n, c in missing.items())
        raise ValueError(
            f"{path} lacks {lacks}. It has the columns {list(types)}; name the right "
            "ones in the settings given in brackets."
        )
    for name, column in named.items():
        pattern, words = wanted.get(name, (".*", ""))
        if not re.match(pattern, types[column]):
            raise ValueError(
                f"{path}: the column {column!r} (setting `{name}`) holds "
                f"{types[column]}; it must hold {words}."
            )


def _column_types(fields: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted name and the type of each column, those in structs included."""
    from pyarrow import types

    for field in fields:
        name = prefix + field.name
        yield name, str(field.type)
        if types.is_struct(field.type):
            yield from _column_types(field.type, name + ".")
