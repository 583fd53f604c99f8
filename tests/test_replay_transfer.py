"""Warm starts, merged buffers, and what the tool says of them."""

import json
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_helpers import completion, contents, group, key

from rllib_exgrpo.records import Group
from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.files import ReplayFiles
from rllib_exgrpo.replay.finding import find_buffer
from rllib_exgrpo.replay.folder import MANIFEST, Folder, ReplayFileError
from rllib_exgrpo.replay.summary import difference, export_rows, summarize_prompts
from rllib_exgrpo.replay.transfer import merge, open_buffer, warm_start

METADATA = {"tokenizer": "t", "environment": "Env", "model": "m"}


def filled(groups, iteration=1, **knobs):
    buffer = ReplayBuffer(**{"group_size": 4, "seed": 0, "metadata": METADATA, **knobs})
    buffer.record(groups, iteration)
    return buffer


def saved(buffer, path):
    ReplayFiles().save(buffer, Folder.at(path))
    return Folder.at(path)


def started(folder, prompt_ids=range(99), **knobs):
    buffer = ReplayBuffer(**{"group_size": 4, "seed": 7, "metadata": METADATA, **knobs})
    warm_start(buffer, folder, prompt_ids)
    return buffer


def tokens(buffer, prompt_id):
    return [key(c)[0] for c in buffer.completions(prompt_id)]


# Warm starts.


@pytest.fixture
def old_run(tmp_path):
    """Prompts 0 to 5 in the buckets 1, 2, 3, 1, 2 and 0; 6 is retired."""
    groups = [group(i, 1 + i % 3, version=10 + i, source="ab"[i % 2]) for i in range(6)]
    buffer = filled([*groups, group(6, 4), group(5, 0)], iteration=9)
    draws = buffer.draw(3, 20)
    buffer.choose(draws, [np.zeros(len(d.candidates)) for d in draws])
    return saved(buffer, tmp_path / "old")


def test_a_warm_start_brings_prompts_completions_and_buckets(old_run):
    old, new = open_buffer(old_run), started(old_run)
    for p in range(6):
        assert new.bucket(p) == old.bucket(p)
        assert tokens(new, p) == tokens(old, p)
    assert new.bucket(6) is None  # retired prompts must be solved again
    assert list(summarize_prompts(new).source) == list(summarize_prompts(old).source)


def test_a_warm_start_counts_from_the_new_runs_first_weights(old_run):
    new = started(old_run)
    # The old run ended with weights 20; prompt i was sampled by weights 10 + i.
    versions = [new.completions(p)[0].weights_version for p in range(6)]
    assert versions == [-10, -9, -8, -7, -6, -5]
    assert {c.iteration for p in range(6) for c in new.completions(p)} == {0}
    assert new.newest_version == 0
    rows = new.store.table.live_rows()
    assert new.store.table["times_replayed"][rows].sum() == 0
    assert np.isnan(new.store.table["entropy"][rows]).all()
    assert new.get_metrics()["distinct_prompts_replayed"] == 0
    assert all(np.isnan(d.scores).all() for d in new.draw(5, 20))


def test_a_maximum_age_holds_for_what_was_brought_along(old_run):
    new = started(old_run, max_age=8)
    drawn = {d.prompt_id for d in new.draw(9, 1)}  # from version -7 on
    assert drawn == {3, 4}  # 5 failed last
    assert new.bucket(0) is None


def test_a_warm_started_buffer_draws_with_its_own_generator(old_run):
    first, second = (
        [d.prompt_id for d in started(old_run, seed=seed).draw(5, 0)] for seed in (1, 1)
    )
    assert first == second
    orders = {tuple(d.prompt_id for d in started(old_run, seed=s).draw(5, 0))
              for s in range(6)}  # fmt: skip
    assert len(orders) > 1


def test_a_warm_started_buffer_goes_on_and_can_be_saved(old_run, tmp_path):
    new = started(old_run)
    new.record([group(0, 3, version=1, first=50), group(3, 4), group("new", 2)], 1)
    assert tokens(new, 0) == [(1,), (50,), (51,), (52,)]
    assert new.is_retired(3)
    again = open_buffer(saved(new, tmp_path / "new"))
    assert contents(again, range(7)) == contents(new, range(7))


def test_buckets_of_another_group_size_become_the_nearest_pass_rate(old_run):
    # 1/4, 2/4, 3/4 of 8 are 2, 4, 6; of 3 they are 0.75, 1.5, 2.25: 1, 2, 2; of 2 there
    # is one bucket. A failed prompt stays failed.
    for size, expected in ((8, [2, 4, 6, 2, 4, 0]), (3, [1, 2, 2, 1, 2, 0]),
                           (2, [1, 1, 1, 1, 1, 0])):  # fmt: skip
        new = started(old_run, group_size=size)
        assert [new.bucket(p) for p in range(6)] == expected
        assert len(new.draw(9, 0)) == 5


def test_prompts_that_the_environment_does_not_have_stay_behind(old_run):
    new = started(old_run, prompt_ids=[1, 4, "other"])
    assert (len(new), new.bucket(0), new.bucket(1), new.bucket(4)) == (2, None, 2, 2)
    assert len(new.draw(9, 0)) == 2
    assert new.num_completions == 4


@pytest.mark.parametrize(
    ("knobs", "ids", "words"),
    [
        ({"metadata": {**METADATA, "tokenizer": "u"}}, [1], "'t'.*'u'"),
        ({"metadata": {**METADATA, "environment": "X"}}, [1], "of Env.* is X"),
        ({}, ["elsewhere"], "none of its 6"),
        ({}, [6], "none of its 6"),
    ],
)
def test_experience_that_does_not_fit_is_refused(old_run, knobs, ids, words):
    with pytest.raises(ValueError, match=words) as refusal:
        started(old_run, prompt_ids=ids, **knobs)
    assert old_run.path in str(refusal.value)


# Merged buffers.


def test_the_newer_group_decides_the_bucket_and_completions_are_united():
    first = filled([group("a", 1), group("b", 3), group("mine", 2)], iteration=5)
    second = filled([group("a", 2, first=2), group("b", 1)], iteration=6)
    first.record([group("b", 2, first=8)], 7)
    both = merge(first, second)
    # a: 2 of 4 in step 6 is newer than 1 in step 5. b: step 7 is newer than 6.
    assert [both.bucket(p) for p in ("a", "b", "mine")] == [2, 2, 2]
    assert tokens(both, "a") == [(1,), (2,), (3,)]
    assert tokens(both, "b") == [(1,), (2,), (3,), (8,), (9,)]
    assert both.num_completions == 10
    assert {d.prompt_id for d in both.draw(9, 0)} == {"a", "b", "mine"}


def test_at_the_same_step_the_first_buffer_decides():
    first, second = filled([group("a", 1)]), filled([group("a", 3)])
    assert merge(first, second).bucket("a") == 1
    assert merge(second, first).bucket("a") == 3


@pytest.mark.parametrize(("solved_at", "retired"), [(3, True), (1, False)])
def test_retired_wins_only_if_it_is_newer(solved_at, retired):
    first = filled([group("a", 2), group("b", 1)], iteration=2)
    second = filled([group("a", 4), group("c", 4)], iteration=solved_at)
    for both in (merge(first, second), merge(second, first)):
        assert both.is_retired("a") == retired
        assert tokens(both, "a") == ([] if retired else [(1,), (2,)])
        assert both.is_retired("c")
        assert len(both) == (1 if retired else 2)


def test_equal_lengths_and_checksums_are_not_enough_to_be_the_same():
    first, second = filled([group("a", 1)]), filled([group("a", 1, first=5)])
    for buffer in (first, second):
        buffer.store.table["crc"][[0]] = 1
    assert tokens(merge(first, second), "a") == [(1,), (5,)]


def test_a_merged_buffer_keeps_log_probs_sources_and_can_be_saved(tmp_path):
    first = filled([group(i, 2, source="x", version=3) for i in range(4)], iteration=4)
    second = filled([group(i, 3, source="y") for i in range(2, 6)], iteration=2)
    first.store.table.fill("iteration", 4)
    second.store.table.fill("iteration", 2)
    both = merge(first, second)
    assert [key(c)[1] for c in both.completions(5)] == [(-1 / 8,), (-2 / 8,), (-3 / 8,)]
    # Oldest first, by step: those of step 2 come before those of step 4.
    assert [c.weights_version for c in both.completions(2)] == [0, 0, 0]
    assert list(summarize_prompts(both).source) == ["x"] * 4 + ["y"] * 2
    again = open_buffer(saved(both, tmp_path))
    assert contents(again, range(6)) == contents(both, range(6))
    again.record([group(5, 2, first=70)], 9)
    assert tokens(again, 5)[-2:] == [(70,), (71,)]


def naive_view(buffer):
    """Prompt -> bucket, step of the latest group, completions with their steps."""
    table = buffer.prompts.table
    rows = {buffer.prompts.id(row): row for row in table.live_rows().tolist()}
    return {
        p: (
            buffer.bucket(p),
            int(table["iteration"][row]),
            [(c.iteration, key(c)[0]) for c in buffer.completions(p)],
        )
        for p, row in rows.items()
    }


def naive_merge(first, second):
    merged = {}
    for p in {*first, *second}:
        ours, theirs = (view.get(p, (None, -1, [])) for view in (first, second))
        bucket = theirs[0] if theirs[1] > ours[1] else ours[0]
        # Oldest first; of the same step the first buffer's; each text once.
        both = sorted([*ours[2], *theirs[2]], key=lambda item: item[0])
        unique = list(dict.fromkeys(text for _, text in both))
        merged[p] = bucket, ([] if bucket == 4 else unique)
    return merged


steps = st.lists(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 4)), max_size=4
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(steps, steps, st.integers(0, 3))
def test_merging_follows_the_rules(first_steps, second_steps, ahead):
    buffers = []
    for start, run in ((0, first_steps), (ahead, second_steps)):
        buffer = filled([])
        for step, groups in enumerate(run, start):
            members = [
                [
                    completion([first + i], float(i < k), iteration=step)
                    for i in range(4)
                ]
                for _, k, first in groups
            ]
            buffer.record(
                [Group(g[0], np.zeros(1, np.int32), m)
                 for g, m in zip(groups, members, strict=True)], step
            )  # fmt: skip
        buffers.append(buffer)
    both = merge(*buffers)
    expected = naive_merge(*map(naive_view, buffers))
    assert {p: (both.bucket(p), tokens(both, p)) for p in expected} == expected
    assert len(both) + both.num_retired == len(expected)


@pytest.mark.parametrize(
    ("knobs", "word"),
    [
        ({"group_size": 5}, "group size"),
        ({"metadata": {**METADATA, "tokenizer": "u"}}, "tokenizer"),
        ({"metadata": {**METADATA, "environment": "X"}}, "environment"),
    ],
)
def test_buffers_that_do_not_fit_are_not_merged(knobs, word):
    with pytest.raises(ValueError, match=f"the {word} of the first"):
        merge(filled([]), filled([], **knobs))


def test_a_difference_tells_moves_and_completions():
    first = filled([group("a", 1), group("b", 3), group("gone", 1)])
    second = filled([group("a", 2), group("b", 4), group("new", 1)])
    change = difference(first, second)
    assert (change.only_first, change.only_second) == (["gone"], ["new"])
    assert dict(zip(change.common_ids, change.moves.tolist(), strict=True)) == {
        "a": [1, 2],
        "b": [3, 4],
    }
    assert change.completions.tolist() == [3, 1, 1]


def test_exported_rows_are_plain_json():
    buffer = filled([group(("p", 1), 2, source="s"), group("q", 4)])
    rows = [json.loads(json.dumps(row)) for row in export_rows(buffer)]
    assert [row["token_ids"] for row in rows] == [[1], [2]]
    assert rows[0]["prompt_id"] == '{"tuple": ["p", 1]}'
    assert rows[0]["entropy"] is None
    assert (rows[0]["source"], rows[0]["environment"]) == ("s", "Env")


def test_a_summary_speaks_of_unsolved_prompts():
    buffer = filled([group("solved", 4), group("a", 2, version=3)])
    members = [completion([7, 8, 9], version=5)] + [completion([0], 0.0)] * 3
    buffer.record([Group("a", np.zeros(1, np.int32), members)], 4)
    summary = summarize_prompts(buffer)
    assert list(summary.ids) == ["a"]
    # Lengths 1, 1, 3; the newest of weights 5, which are the newest seen.
    assert (summary.length[0], summary.age[0]) == (pytest.approx(5 / 3), 0)
    assert (summary.bucket[0], summary.completions[0], summary.iteration[0]) == (
        1,
        3,
        4,
    )
    assert np.isnan(summary.entropy[0])
    assert len(summarize_prompts(filled([]))) == 0


# Where a buffer is.


def test_the_latest_whole_checkpoint_of_a_run_is_found(tmp_path):
    paths = [tmp_path / f"trial/checkpoint_{i:06d}/replay_buffer" for i in range(3)]
    for i, path in enumerate(paths):
        saved(filled([group(i, 2)]), path)
    os.utime(paths[2] / MANIFEST, (0, 0))  # a copied run has lost its files' times
    assert find_buffer(paths[0]).path == str(paths[0])
    assert find_buffer(paths[1].parent).path == str(paths[1])
    assert find_buffer(tmp_path).path == str(paths[2])
    # The last one is still being copied: its manifest is there, a file is not.
    next(paths[2].glob("completions-*")).unlink()
    assert find_buffer(tmp_path).path == str(paths[1])


def test_a_folder_without_a_buffer_is_named(tmp_path):
    with pytest.raises(ReplayFileError, match=re.escape(str(tmp_path))):
        find_buffer(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(ReplayFileError, match=re.escape(str(tmp_path))):
        open_buffer(find_buffer(tmp_path))
