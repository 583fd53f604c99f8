"""A replay buffer in numbers, for people: by prompt, and against another buffer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.records import PromptId
from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.ids import encode_id


@dataclass(frozen=True, eq=False)
class PromptSummary:
    """The unsolved prompts of a buffer, one element each.

    Attributes:
        ids: (P,) object.
        source: (P,) object, names of data sets.
        bucket: (P,) k of the latest group.
        iteration: (P,) of the latest group; 0 = brought along from another run.
        replayed: (P,) how often.
        completions: (P,) stored ones.
        length: (P,) their mean tokens.
        age: (P,) of the newest one, in versions of the weights.
        entropy: (P,) lowest known, in nats a token; NaN where none was scored.
    """

    ids: NDArray[np.object_]
    source: NDArray[np.object_]
    bucket: NDArray[np.int64]
    iteration: NDArray[np.int64]
    replayed: NDArray[np.int64]
    completions: NDArray[np.int64]
    length: NDArray[np.float64]
    age: NDArray[np.int64]
    entropy: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.ids)


def summarize_prompts(buffer: ReplayBuffer) -> PromptSummary:
    """Returns the unsolved prompts of a buffer."""
    table = buffer.prompts.table
    rows = table.live_rows()
    rows = rows[table["bucket"][rows] < buffer.group_size]
    items = completion_columns(buffer)
    place = np.searchsorted(rows, items["prompt"])
    count = np.bincount(place, minlength=len(rows))
    newest = np.full(len(rows), np.iinfo(np.int64).min)
    np.maximum.at(newest, place, items["weights_version"])
    entropy = np.full(len(rows), np.inf)
    np.fmin.at(entropy, place, items["entropy"])
    names = np.array([*buffer.sources, ""], object)
    ids = np.empty(len(rows), object)
    for i, row in enumerate(rows.tolist()):  # a slice would unpack tuples
        ids[i] = buffer.prompts.id(row)
    return PromptSummary(
        ids=ids,
        source=names[table["source"][rows]],
        bucket=table["bucket"][rows],
        iteration=table["iteration"][rows],
        replayed=table["times_replayed"][rows],
        completions=count,
        length=np.bincount(place, items["length"], len(rows)) / np.maximum(count, 1),
        age=buffer.newest_version - newest,
        entropy=np.where(np.isinf(entropy), np.nan, entropy),
    )


def completion_columns(buffer: ReplayBuffer) -> dict[str, NDArray]:
    """Returns the columns of the stored completions, with "age" among them."""
    columns = buffer.store.table.columns(buffer.store.table.live_rows())
    return {**columns, "age": buffer.newest_version - columns["weights_version"]}


def export_rows(buffer: ReplayBuffer) -> Iterator[dict[str, Any]]:
    """Yields every stored completion as plain data, prompt by prompt."""
    table = buffer.store.table
    names = ("times_replayed", "entropy", "nll", "scored_version")
    summary = summarize_prompts(buffer)
    for prompt_id, source, bucket in zip(
        summary.ids, summary.source, summary.bucket.tolist(), strict=True
    ):
        rows = buffer.rows_of(prompt_id)
        for row, item in zip(rows, buffer.store.completions(rows), strict=True):
            numbers = {name: table[name][row].item() for name in names}
            yield {
                "prompt_id": encode_id(prompt_id),
                "source": source,
                "environment": buffer.metadata.get("environment", ""),
                "bucket": bucket,
                "token_ids": item.token_ids.tolist(),
                "behavior_logp": item.behavior_logp.tolist(),
                "reward": item.reward,
                "weights_version": item.weights_version,
                "iteration": item.iteration,
                "truncated": item.truncated,
                # JSON has no NaN.
                **{n: None if v != v else v for n, v in numbers.items()},
            }


@dataclass(frozen=True, eq=False)
class Difference:
    """How two buffers differ.

    Attributes:
        only_first: prompts that the second does not know.
        only_second: prompts that the first does not know.
        moves: (N, 2) bucket in the first and in the second, of each common prompt; G =
            retired.
        common_ids: (N,) object, the common prompts.
        completions: (3,) of the common prompts: in the first only, in the second
            only, in both.
    """

    only_first: list[PromptId]
    only_second: list[PromptId]
    moves: NDArray[np.int64]
    common_ids: NDArray[np.object_]
    completions: NDArray[np.int64]


def difference(first: ReplayBuffer, second: ReplayBuffer) -> Difference:
    """Compares two buffers of the same group size."""
    ids = [list(_all_ids(buffer)) for buffer in (first, second)]
    common = [i for i in ids[0] if second.bucket(i) is not None]
    common_ids = np.empty(len(common), object)
    moves = np.zeros((len(common), 2), np.int64)
    shared = np.zeros(3, np.int64)
    for n, prompt_id in enumerate(common):
        common_ids[n] = prompt_id
        moves[n] = [buffer.bucket(prompt_id) or 0 for buffer in (first, second)]
        ours, theirs = (
            {c.token_ids.tobytes() for c in buffer.completions(prompt_id)}
            for buffer in (first, second)
        )
        shared += len(ours - theirs), len(theirs - ours), len(ours & theirs)
    return Difference(
        only_first=[i for i in ids[0] if second.bucket(i) is None],
        only_second=[i for i in ids[1] if first.bucket(i) is None],
        moves=moves,
        common_ids=common_ids,
        completions=shared,
    )


def _all_ids(buffer: ReplayBuffer) -> Iterator[PromptId]:
    return map(buffer.prompts.id, buffer.prompts.table.live_rows().tolist())
