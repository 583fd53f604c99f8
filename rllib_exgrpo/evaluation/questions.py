"""The result of each question of an evaluation, and its file.

Schema of `questions-ITERATION.parquet`, one row a question: evaluation_set string,
iteration int32, prompt_id string (JSON, see `replay.ids`), source string, num_samples,
num_correct, num_truncated, num_formatted int32 (samples), length_mean double (tokens),
majority list<double> (right share of majority votes of 2, 4, 8, ... samples; null
without a notion of an answer).
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rllib_exgrpo.evaluation.estimators import majority_at_k, powers_of_two
from rllib_exgrpo.records import Group
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.replay.ids import encode_id

FOLDER = "evaluation"
"""Where in a run's folder the files of its evaluations lie."""

_WITHOUT_FORMAT = ("no_answer", "answer_unparsed")

_SCHEMA = pa.schema(
    {
        "evaluation_set": pa.string(),
        "iteration": pa.int32(),
        "prompt_id": pa.string(),
        "source": pa.string(),
        "num_samples": pa.int32(),
        "num_correct": pa.int32(),
        "num_truncated": pa.int32(),
        "num_formatted": pa.int32(),
        "length_mean": pa.float64(),
        "majority": pa.list_(pa.float64()),
    }
)


@dataclass(frozen=True, slots=True)
class Question:
    """What an evaluation found on one question.

    Attributes:
        evaluation_set: which set it belongs to.
        iteration: training steps before the evaluation.
        prompt_id: JSON text, as `encode_id` writes it.
        source: which data set the problem belongs to.
        num_samples: completions sampled [n].
        num_correct: of them [c].
        num_truncated: that the length limit ended.
        num_formatted: in which the verifier found an answer to read.
        length_mean: tokens of a completion.
        majority: right share of majority votes of 2, 4, 8, ... samples; None if the
            environment has no notion of an answer.
    """

    evaluation_set: str
    iteration: int
    prompt_id: str
    source: str
    num_samples: int
    num_correct: int
    num_truncated: int
    num_formatted: int
    length_mean: float
    majority: list[float] | None = None

    @property
    def pass_rate(self) -> float:
        """Share of correct completions."""
        return self.num_correct / self.num_samples


def question_from_group(
    group: Group, *, evaluation_set: str, iteration: int, success_threshold: float
) -> Question:
    """Summarises the completions of one question."""
    completions = group.completions
    is_correct_G = [c.reward >= success_threshold for c in completions]
    return Question(
        evaluation_set=evaluation_set,
        iteration=iteration,
        prompt_id=encode_id(group.prompt_id),
        source=group.source,
        num_samples=len(completions),
        num_correct=sum(is_correct_G),
        num_truncated=sum(c.truncated for c in completions),
        num_formatted=sum(r not in _WITHOUT_FORMAT for r in group.reasons),
        length_mean=float(np.mean([len(c) for c in completions])),
        majority=None
        if group.answers is None
        else [
            majority_at_k(group.answers, is_correct_G, k)
            for k in powers_of_two(len(completions))[1:]
        ],
    )


def write_questions(folder: Folder, iteration: int, questions: list[Question]) -> None:
    """Writes the results of an evaluation into a run's folder for evaluations."""
    write_table(folder, f"questions-{iteration:06d}.parquet", _table(questions))


def write_question_file(path: str | Path, questions: list[Question]) -> None:
    """Writes results into a file of any name."""
    write_table(Folder.at(Path(path).parent), Path(path).name, _table(questions))


def _table(questions: list[Question]) -> pa.Table:
    return pa.Table.from_pylist([asdict(q) for q in questions], schema=_SCHEMA)


def write_table(folder: Folder, name: str, table: pa.Table) -> None:
    """Writes a small parquet file under a temporary name and renames it."""
    folder.filesystem.create_dir(folder.path, recursive=True)
    folder.write(name, lambda sink: pq.write_table(table, sink, compression="zstd"))


def read_questions(run: str | Path) -> list[Question]:
    """Reads the results of all evaluations of a run.

    Args:
        run: its folder, or one file of results.

    Returns:
        The questions, by iteration; empty if the run kept none.

    Raises:
        ValueError: if a file has other columns, or the folder holds several runs.
    """
    run = Path(run)
    files = [run] if run.is_file() else find_files(run, "questions-*.parquet")
    folders = {str(file.parent.parent) for file in files}
    if len(folders) > 1:
        raise ValueError(f"{run} holds several runs: give one of {sorted(folders)}.")
    questions: list[Question] = []
    for file in files:
        table = pq.read_table(file)
        if table.schema.names != _SCHEMA.names:
            raise ValueError(
                f"{file} has the columns {table.schema.names}; results of an "
                f"evaluation have {_SCHEMA.names}."
            )
        questions += [Question(**row) for row in table.to_pylist()]
    return questions


def find_files(run: Path, pattern: str) -> list[Path]:
    """Returns the files of a run's evaluations, by iteration."""
    return sorted(run.rglob(f"{FOLDER}/{pattern}"))


def latest(questions: Sequence[Question]) -> list[Question]:
    """Keeps the questions of the last evaluation."""
    last = max((q.iteration for q in questions), default=0)
    return [q for q in questions if q.iteration == last]


def by_set(questions: Iterable[Question]) -> dict[str, list[Question]]:
    """Sorts questions by their evaluation set, in the order of appearance."""
    sets: dict[str, list[Question]] = {}
    for question in questions:
        sets.setdefault(question.evaluation_set, []).append(question)
    return sets
