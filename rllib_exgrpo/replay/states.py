"""The state of a replay buffer, cut, merged and carried over to another run."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.replay.store import NONE

State: TypeAlias = Mapping[str, Any]
"""What `ReplayBuffer.get_state` returns."""

BEFORE_THE_RUN = 0
"""Iteration of what another run brought along."""


def keep_prompts(state: State, wanted_P: NDArray[np.bool_]) -> dict[str, Any]:
    """Returns a state without some of its prompts, and without their completions."""
    prompts, completions = state["prompts"], state["completions"]
    ids = [i for i, wanted in zip(prompts["ids"], wanted_P, strict=True) if wanted]
    columns = {name: values[wanted_P] for name, values in prompts["columns"].items()}
    of_prompt = completions["columns"]["prompt"]
    number = np.cumsum(wanted_P, dtype=np.int32) - 1
    rows = {n: v[wanted_P[of_prompt]] for n, v in completions["columns"].items()}
    rows["prompt"] = number[rows["prompt"]]
    return {
        **state,
        "prompts": {"ids": ids, "columns": _with_positions(columns)},
        "completions": {**completions, "columns": rows},
    }


def carried_over(state: State, group_size: int) -> dict[str, Any]:
    """Returns a state as the start of another run; see docs/replay.md.

    Retired prompts stay behind. A bucket k of G becomes the one of the nearest pass
    rate. Ages go on: the newest weights of the old run count as version 0 of the new
    one. Scores and counts of replays start anew.

    Args:
        state: of the old run.
        group_size: of the new run.
    """
    old_size, newest = state["group_size"], state["counters"]["newest_version"]
    state = keep_prompts(state, state["prompts"]["columns"]["bucket"] < old_size)
    prompts, completions = state["prompts"], state["completions"]
    columns, rows = dict(prompts["columns"]), dict(completions["columns"])
    columns["bucket"] = _rescaled(columns["bucket"], old_size, group_size)
    columns["iteration"] = np.full_like(columns["iteration"], BEFORE_THE_RUN)
    columns["times_replayed"] = np.zeros_like(columns["times_replayed"])
    rows["weights_version"] = rows["weights_version"] - np.int32(newest)
    rows["iteration"] = np.full_like(rows["iteration"], BEFORE_THE_RUN)
    rows["times_replayed"] = np.zeros_like(rows["times_replayed"])
    rows["scored_version"] = np.full_like(rows["scored_version"], NONE)
    for score in ("entropy", "nll"):
        rows[score] = np.full_like(rows[score], np.nan)
    return {
        **state,
        "group_size": group_size,
        "prompts": {**prompts, "columns": _with_positions(columns)},
        "completions": {**completions, "columns": rows},
    }


def _rescaled(bucket: NDArray, old_size: int, new_size: int) -> NDArray:
    nearest = np.rint(bucket * (new_size / old_size))
    return np.where(bucket == 0, 0, nearest.clip(1, new_size - 1)).astype(bucket.dtype)


def _with_positions(columns: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """Returns prompt columns whose positions count up from 0 in each bucket."""
    bucket, position = columns["bucket"], columns["position"]
    order = np.lexsort((position, bucket))
    sizes = np.bincount(bucket)
    starts = np.cumsum(sizes) - sizes
    counted = np.empty_like(position)
    counted[order] = np.arange(len(order)) - starts[bucket[order]]
    return {**columns, "position": counted}


def merged(first: State, second: State) -> dict[str, Any]:
    """Returns the experience of two runs in one state; see docs/replay.md.

    A prompt that both hold takes bucket and source of the newer group, by iteration;
    of equals, the first run's. It is retired only if it was retired there; else it has
    the completions of both. Of two with the same token ids the older one stays. Of two
    counts of replays the larger one does.

    Args:
        first: of the run whose random generator goes on.
        second: of a run with the same group size.
    """
    sources = list(
        dict.fromkeys(first["counters"]["sources"] + second["counters"]["sources"])
    )
    ids, prompts, places = _merged_prompts(first, second, sources)
    rows, segments = _merged_rows(first, second, places)
    is_kept = prompts["bucket"][rows["prompt"]] < first["group_size"]
    is_kept &= ~_repeated(rows, segments["token_ids"])
    rows = {name: values[is_kept] for name, values in rows.items()}
    counters = [state["counters"] for state in (first, second)]
    return {
        "group_size": first["group_size"],
        "counters": {
            **first["counters"],
            "sources": sources,
            "next_id": int(rows["id"].max(initial=NONE)) + 1,
            "iteration": max(c["iteration"] for c in counters),
            "newest_version": max(c["newest_version"] for c in counters),
            "distinct_prompts_replayed": int((prompts["times_replayed"] > 0).sum()),
        },
        "prompts": {"ids": ids, "columns": _with_positions(prompts)},
        "completions": {**segments, "columns": rows},
    }


def _merged_prompts(
    first: State, second: State, sources: list[str]
) -> tuple[list[Any], dict[str, NDArray], tuple[NDArray, NDArray]]:
    """Returns ids and columns of all prompts, and where each run's have gone."""
    number: dict[Any, int] = {}
    places = tuple(
        np.array(
            [number.setdefault(i, len(number)) for i in state["prompts"]["ids"]],
            np.int32,
        )
        for state in (first, second)
    )
    parts = [
        {
            **state["prompts"]["columns"],
            "source": np.array(
                [sources.index(name) for name in state["counters"]["sources"]], np.int32
            )[state["prompts"]["columns"]["source"]],
        }
        for state in (first, second)
    ]
    iterations = np.full((2, len(number)), np.iinfo(np.int32).min)
    for run in range(2):
        iterations[run, places[run]] = parts[run]["iteration"]
    newer = iterations[1] > iterations[0]
    columns = {}
    for name in parts[0]:
        values = np.zeros((2, len(number)), parts[0][name].dtype)
        for run in range(2):
            values[run, places[run]] = parts[run][name]
        is_count = name == "times_replayed"
        columns[name] = values.max(0) if is_count else np.where(newer, *values[::-1])
    return list(number), columns, places  # type: ignore[return-value]


def _merged_rows(
    first: State, second: State, places: tuple[NDArray, NDArray]
) -> tuple[dict[str, NDArray], dict[str, Any]]:
    """Returns the completions of both runs, numbered by age, and their segments."""
    both = [state["completions"] for state in (first, second)]
    rows = {
        name: np.concatenate([part["columns"][name] for part in both])
        for name in both[0]["columns"]
    }
    sizes = [len(part["columns"]["id"]) for part in both]
    rows["prompt"] = np.concatenate(
        [p[c["columns"]["prompt"]] for p, c in zip(places, both, strict=True)]
    ).astype(np.int32)
    shift = np.repeat([0, len(both[0]["token_ids"])], sizes)
    rows["segment"] = (rows["segment"] + shift).astype(np.int32)
    order = np.lexsort((rows["id"], np.repeat([0, 1], sizes), rows["iteration"]))
    rows["id"] = np.empty_like(rows["id"])
    rows["id"][order] = np.arange(len(order))
    segments = {
        name: both[0][name] + both[1][name] for name in ("token_ids", "behavior_logp")
    }
    return rows, segments


def _repeated(rows: Mapping[str, NDArray], segments: list[NDArray]) -> NDArray:
    """Returns (N,) bool, True where an older row of the prompt has the same tokens."""
    order = np.lexsort((rows["id"], rows["length"], rows["crc"], rows["prompt"]))
    suspects = np.ones(max(len(order) - 1, 0), bool)
    for name in ("prompt", "crc", "length"):
        values = rows[name][order]
        suspects &= values[1:] == values[:-1]
    repeated = np.zeros(len(order), bool)
    for place in np.flatnonzero(suspects).tolist():
        older, newer = order[place : place + 2].tolist()
        repeated[newer] = np.array_equal(
            _tokens(rows, segments, older), _tokens(rows, segments, newer)
        )
    return repeated


def _tokens(rows: Mapping[str, NDArray], segments: list[NDArray], row: int) -> NDArray:
    start = rows["start"][row]
    return segments[rows["segment"][row]][start : start + rows["length"][row]]
