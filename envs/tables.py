"""What the environments share that read their problems from tables."""

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .base import Problem, UnknownPromptError, VerifiableTextEnv
from .columns import (
    PROMPTS,
    SCALARS,
    TEXTS,
    Place,
    Table,
    check_columns,
    last_user_contents,
)
from .lazy import ColumnIds, LazyProblems, RowIds
from .rows import Rows
from .sources import find_source

logger = logging.getLogger(__name__)

_MAX_LISTED_ROWS = 10


class TableEnv(VerifiableTextEnv):
    """Reads its problems from parquet, Arrow, JSON-lines or CSV; see docs/data.md.

    Tables of at most `max_rows_in_memory` rows are read and checked whole. Rows with
    the same question and gold answer are one problem there; its id is a hash of the
    question, so that it survives a reordering of the file. Larger tables stay on disk:
    each row is a problem, its id is the row's number, and rows are read when drawn.

    A subclass writes `verify`, names its own columns in `column_settings`, and
    overrides `fault` and `to_problem` where its rows need it.

    Settings:
        data: a path or a list of paths: files, patterns, folders of files, folders that
            the package `datasets` saved; or `hf:NAME`, a data set of the Hugging Face
            hub.
        subset: of a data set of the hub.
        prompt_column: chat messages (`role`, `content`), or a text.
        answer_column: the gold answer. A dot in a column's name enters a struct.
        source_column: the data set's name, for metrics; None for none.
        id_column: the prompt ids; None makes them as said above.
        split_column, split: keep only the rows whose column has this value; of Hugging
            Face data with named splits, `split` is that name.
        limit: keep only so many problems; None keeps all.
        on_bad_rows: "error" or "drop" rows without a question or a usable gold answer,
            and those that give one id different questions or answers.
        max_rows_in_memory: largest table that is read whole; None reads any whole.
        check_rows: rows of a larger table that are checked at start, the others when
            they are drawn; None checks all at start.
        cache_dir: folder for decoded parquet row groups of larger tables; None is
            `rllib_exgrpo` in the user's cache folder.
    """

    settings: ClassVar = {
        "data": None,
        "subset": None,
        "prompt_column": "prompt",
        "answer_column": "answer",
        "source_column": None,
        "id_column": None,
        "split_column": "split",
        "split": None,
        "limit": None,
        "on_bad_rows": "error",
        "max_rows_in_memory": 50_000,
        "check_rows": 2_000,
        "cache_dir": None,
    }

    column_settings: ClassVar[dict[str, tuple[str, str]]] = {
        "prompt_column": PROMPTS,
        "answer_column": SCALARS,
        "source_column": TEXTS,
        "id_column": SCALARS,
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
        if problem.prompt_id is None:
            return "no id"
        has_question = problem.prompt and str(problem.text or "").strip()
        return "" if has_question else "no question"

    def load(self) -> Iterable[Problem] | Mapping[Hashable, Problem]:
        """Opens the table; reads and checks it, or a sample of a large one.

        Raises:
            FileNotFoundError: if `data` names nothing.
            ImportError: for data of the Hugging Face hub without `datasets`.
            ValueError: for missing columns, columns of a wrong type, or bad rows.
        """
        if self.config["on_bad_rows"] not in ("error", "drop"):
            raise ValueError(
                f"`on_bad_rows` is {self.config['on_bad_rows']!r}; take 'error' or "
                "'drop'."
            )
        largest, limit = self.config["max_rows_in_memory"], self.config["limit"]
        size = min(len(self._table), limit or len(self._table))
        if largest is None or size <= largest:
            return self._read_all()
        return self._open_lazily()

    def question_texts(self) -> Iterator[Any]:
        """Yields Arrow arrays of the questions as they stand in the table."""
        num_left = self._num_rows_loaded if self.prompt_ids else 0
        for prompts in self._table.column("prompt_column"):
            if num_left <= 0:
                return
            yield last_user_contents(prompts[:num_left])
            num_left -= len(prompts)

    @cached_property
    def _table(self) -> Table:
        """The opened files, with their columns checked."""
        config = self.config
        if not config["data"]:
            raise ValueError(
                f"{type(self).__name__} needs the setting `data`: the path of a "
                "parquet, Arrow, JSON-lines or CSV file or folder, a list of paths, or "
                "'hf:NAME'."
            )
        source = find_source(config["data"], config["split"], config["subset"])
        split = None if source.split_is_chosen else config["split"]
        settings = [*self.column_settings, *["split_column"] * (split is not None)]
        named = {name: config[name] for name in settings if config[name]}
        rows = Rows(source.paths, _cache_dir(config["cache_dir"]))
        check_columns(rows.blocks, named, self.column_settings)
        return Table(rows, named, split)

    # --- tables in memory

    def _read_all(self) -> list[Problem]:
        """Reads the table and makes one problem of equal rows."""
        problems: dict[Hashable, Problem] = {}
        bad, repeated = _RowList(), _RowList()
        self._num_rows_loaded = 0
        for place, values in self._table.read():
            if len(problems) == self.config["limit"]:
                break
            self._num_rows_loaded += 1
            problem = self._to_problem(values)
            known = problems.get(problem.prompt_id, problem)
            fault = self.fault(problem) or _contradiction(known, problem)
            if fault:
                bad.add(fault, place)
            elif known is problem:
                problems[problem.prompt_id] = problem
            else:
                repeated.add("rows that repeat a problem", place)
        self._report(bad)
        for line in repeated.lines():
            logger.info("%s", line)
        logger.info(
            "%s: %d problems from %d rows, all of them checked.",
            type(self).__name__,
            len(problems),
            self._num_rows_loaded,
        )
        return list(problems.values())

    def _to_problem(self, values: dict[str, Any]) -> Problem:
        problem = self.to_problem(values)
        if "id_column" in values:
            problem = replace(problem, prompt_id=values["id_column"])
        return problem

    # --- tables on disk

    def _open_lazily(self) -> LazyProblems:
        """Checks a sample of the table and leaves it on disk."""
        table, bad, num_checked = self._table, _RowList(), 0
        for place, values in table.sample(self.config["check_rows"]):
            num_checked += 1
            fault = self.fault(self._to_problem(values))
            if fault:
                bad.add(fault, place)
        ids = self._lazy_ids(table, bad)
        self._report(bad)
        self._num_rows_loaded = len(ids)
        logger.info(
            "%s: %d problems, read from disk when drawn; %d rows were checked "
            "(`check_rows`), the others are checked when drawn. Ids are %s.",
            type(self).__name__,
            len(ids),
            num_checked,
            "row numbers" if isinstance(ids, RowIds) else self.config["id_column"],
        )
        return LazyProblems(ids, self._read_one)

    def _lazy_ids(self, table: Table, bad: "_RowList") -> RowIds | ColumnIds:
        rows = table.split_rows()[: self.config["limit"]]
        if not self.config["id_column"]:
            return RowIds(rows)
        import pyarrow as pa

        values = pa.chunked_array([*table.column("id_column")])[: len(rows)]
        numbered = pa.table({"id": values, "row": pa.array(np.asarray(rows))})
        # In one thread, which keeps the order.
        firsts = numbered.group_by("id", use_threads=False).aggregate([("row", "min")])
        firsts = firsts.filter(firsts["id"].is_valid())
        kept = firsts["row_min"].to_numpy()
        for row in np.setdiff1d(np.asarray(rows), kept):
            bad.add("no id, or an id used before", table.place(int(row)))
        return ColumnIds(firsts["id"].combine_chunks(), array("q", kept.tobytes()))

    def _read_one(self, prompt_id: Hashable) -> Problem:
        ids: Any = self.prompt_ids
        place, values = self._table.values(ids.row(prompt_id))
        problem = replace(self.to_problem(values), prompt_id=prompt_id)
        fault = self.fault(problem)
        if not fault:
            return problem
        found = f"row {place.row} of {place.path} (rows count from 0): {fault}."
        if self.config["on_bad_rows"] == "drop":
            raise UnknownPromptError(f"{found} It is left out (`on_bad_rows`='drop').")
        raise ValueError(f"{found} Mend it, or set `on_bad_rows` to 'drop'.")

    def _report(self, bad: "_RowList") -> None:
        if bad and self.config["on_bad_rows"] == "error":
            raise ValueError(
                "There are rows that cannot be used (row numbers count from 0). "
                f"{'; '.join(bad.lines())}. Mend them, or set `on_bad_rows` to 'drop' "
                "to leave them out."
            )
        for line in bad.lines():
            logger.warning("%s; rows left out (row numbers count from 0)", line)


class _RowList(dict[tuple[str, str], list[int]]):
    """Row numbers by what was found and by file."""

    def add(self, found: str, place: Place) -> None:
        self.setdefault((place.path, found), []).append(place.row)

    def lines(self) -> list[str]:
        """Returns a line for each finding and file: "F: no question: 2 (rows ...)"."""
        return [f"{p}: {found}: {_listed(rows)}" for (p, found), rows in self.items()]


def question_id(prompt: Any) -> str:
    """Returns a short hash of a prompt."""
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]


def _contradiction(known: Problem, problem: Problem) -> str:
    if known.prompt != problem.prompt:
        return "another question under an id used before"
    same = known.answer == problem.answer
    return "" if same else "another answer to a question asked before"


def _listed(rows: list[int]) -> str:
    more = f" and {len(rows) - _MAX_LISTED_ROWS} more" * (len(rows) > _MAX_LISTED_ROWS)
    return f"{len(rows)} (rows {', '.join(map(str, rows[:_MAX_LISTED_ROWS]))}{more})"


def _cache_dir(setting: str | Path | None) -> Path:
    if setting is not None:
        return Path(setting)
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "rllib_exgrpo"
