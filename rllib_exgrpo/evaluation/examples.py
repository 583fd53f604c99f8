"""A few completions of each evaluation, kept as text for the report.

Schema of `examples-ITERATION.parquet`, one row a completion: the fields of `Example`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rllib_exgrpo.evaluation.questions import Question, find_files, write_table
from rllib_exgrpo.records import Group
from rllib_exgrpo.replay.folder import Folder

NUM_PROMPTS = 4
"""Prompts that are kept of the worst, and of the best, of each evaluation set."""

_SCHEMA = pa.schema(
    {
        "evaluation_set": pa.string(),
        "iteration": pa.int32(),
        "prompt_id": pa.string(),
        "source": pa.string(),
        "num_samples": pa.int32(),
        "num_correct": pa.int32(),
        "prompt": pa.string(),
        "completion": pa.string(),
        "num_tokens": pa.int32(),
        "reward": pa.float64(),
        "reason": pa.string(),
        "truncated": pa.bool_(),
    }
)


@dataclass(frozen=True, slots=True)
class Example:
    """A completion of an evaluation, as text.

    Attributes:
        evaluation_set: which set the question belongs to.
        iteration: training steps before the evaluation.
        prompt_id: JSON text.
        source: which data set the problem belongs to.
        num_samples: completions of the question.
        num_correct: of them.
        prompt: as the model read it.
        completion: as it answered.
        num_tokens: of the completion.
        reward: of the completion; NaN without a verdict.
        reason: the verifier's.
        truncated: whether the length limit ended it.
    """

    evaluation_set: str
    iteration: int
    prompt_id: str
    source: str
    num_samples: int
    num_correct: int
    prompt: str
    completion: str
    num_tokens: int
    reward: float
    reason: str
    truncated: bool

    @property
    def pass_rate(self) -> float:
        """Share of the question's completions that are correct."""
        return self.num_correct / self.num_samples


def choose_examples(
    questions: Sequence[Question],
    groups: Sequence[Group],
    decode: Callable[[Any], str],
) -> list[Example]:
    """Chooses the worst and the best questions, with a right and a wrong completion.

    Args:
        questions: of one evaluation set.
        groups: their completions, in the same order.
        decode: turns token ids into text.
    """
    order = sorted(range(len(questions)), key=lambda i: questions[i].pass_rate)
    chosen = dict.fromkeys([*order[:NUM_PROMPTS], *order[-NUM_PROMPTS:]])
    return [e for i in chosen for e in _of_group(questions[i], groups[i], decode)]


def _of_group(
    question: Question, group: Group, decode: Callable[[Any], str]
) -> Iterator[Example]:
    rewards_G = np.nan_to_num(group.rewards_G, nan=-1.0)
    chosen = [int(rewards_G.argmax()), int(rewards_G.argmin())]
    if np.ptp(rewards_G) == 0:
        chosen = [0]
    for i in chosen:
        completion = group.completions[i]
        yield Example(
            evaluation_set=question.evaluation_set,
            iteration=question.iteration,
            prompt_id=question.prompt_id,
            source=question.source,
            num_samples=question.num_samples,
            num_correct=question.num_correct,
            prompt=decode(group.prompt_token_ids),
            completion=decode(completion.token_ids),
            num_tokens=len(completion),
            reward=completion.reward,
            reason=group.reasons[i],
            truncated=completion.truncated,
        )


def write_examples(folder: Folder, iteration: int, examples: list[Example]) -> None:
    """Writes the examples of an evaluation into a run's folder for evaluations."""
    table = pa.Table.from_pylist([asdict(e) for e in examples], schema=_SCHEMA)
    write_table(folder, f"examples-{iteration:06d}.parquet", table)


def read_examples(run: str | Path, iteration: int | None = None) -> list[Example]:
    """Reads the examples of an evaluation of a run; empty if it kept none.

    Args:
        run: its folder.
        iteration: training steps before the evaluation; None takes the last one.
    """
    number = "*" if iteration is None else f"{iteration:06d}"
    files = find_files(Path(run), f"examples-{number}.parquet")
    rows = pq.read_table(files[-1]).to_pylist() if files else []
    return [Example(**row) for row in rows]
