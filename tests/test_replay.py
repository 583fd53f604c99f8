import re

import numpy as np
import pytest
from replay_helpers import completion, contents, group, key

from rllib_exgrpo.records import Completion, Group
from rllib_exgrpo.replay.buffer import ReplayBuffer


def filled(num_prompts=3, correct=2, **knobs):
    buffer = ReplayBuffer(group_size=4, seed=0, **knobs)
    buffer.record([group(i, correct) for i in range(num_prompts)], iteration=1)
    return buffer


# What is stored.


def test_buckets_by_reward_spread_store_successes_all_the_same():
    buffer = ReplayBuffer(
        group_size=4, bucket_by="reward_spread", success_threshold=0.8, seed=0
    )
    rewards = {
        "wide": [1.0, 0.0, 1.0, 0.0],  # deviation 1/2, the largest
        "narrow": [0.8, 0.8, 0.8, 0.6],  # 0.087 / 0.5 * 4 = 0.69, rounded 1
        "wrong": [0.5, 0.5, 0.5, 0.5],
        "solved": [0.9, 0.9, 0.9, 0.9],
        "unknown": [float("nan"), 1.0, 1.0, 1.0],  # NaN is not correct: 0.43 / 0.5 * 4
    }
    groups = [
        Group(
            name,
            np.zeros(1, np.int32),
            [completion([i], r) for i, r in enumerate(values)],
        )
        for name, values in rewards.items()
    ]
    buffer.record(groups, 1)
    assert buffer.retired == {"solved"}
    assert [buffer.bucket(name) for name in ("wide", "narrow", "unknown")] == [3, 1, 3]
    assert len(buffer) == 3
    assert [key(c)[0] for c in buffer.completions("narrow")] == [(0,), (1,), (2,)]
    assert {d.prompt_id for d in buffer.draw(9, 1)} == {"wide", "narrow", "unknown"}
    # A later group without a success; one alone, which has no spread to compare with.
    buffer.record([group("wide", 0), group("narrow", 2)], 2)
    assert [buffer.bucket(name) for name in ("wide", "narrow")] == [0, 3]
    buffer.record([group("narrow", 2)], 3)
    assert buffer.bucket("narrow") == 0


def test_a_partly_solved_group_enters_its_bucket_with_its_correct_completions():
    buffer = filled(num_prompts=1, correct=2)
    assert len(buffer) == 1
    assert buffer.bucket(0) == 2
    assert [key(c)[0] for c in buffer.completions(0)] == [(1,), (2,)]
    np.testing.assert_array_equal(buffer.bucket_sizes, [0, 0, 1, 0])


def test_the_replayed_member_counts_but_is_not_stored_again():
    buffer = filled(num_prompts=1, correct=1)
    buffer.record([group(0, 0, replayed=completion([1]))], 2)
    assert buffer.bucket(0) == 1  # only the replayed one was correct
    buffer.record([group(0, 2, replayed=completion([9]))], 3)
    assert buffer.bucket(0) == 3
    assert [key(c)[0] for c in buffer.completions(0)] == [(1,), (2,)]


def test_equal_token_ids_are_stored_once_and_the_first_stays():
    buffer = filled(num_prompts=1, correct=2)
    buffer.record([group(0, 3, version=5)], 2)
    stored = buffer.completions(0)
    assert [key(c)[0] for c in stored] == [(1,), (2,), (3,)]
    assert [c.weights_version for c in stored] == [0, 0, 5]


def test_a_solved_prompt_retires_and_later_groups_of_it_are_ignored():
    buffer = filled(num_prompts=2)
    buffer.record([group(0, 4), group("new", 4)], 2)
    assert buffer.retired == {0, "new"}
    assert (len(buffer), buffer.num_completions, buffer.num_retired) == (1, 2, 2)
    assert buffer.is_retired("new") and not buffer.is_retired(1)
    buffer.record([group(0, 2), group("new", 0)], 3)
    assert buffer.retired == {0, "new"}
    assert len(buffer) == 1


def test_all_fresh_correct_with_a_wrong_replayed_member_is_not_solved():
    buffer = filled(num_prompts=1)
    buffer.record([group(0, 3, replayed=completion([7], reward=0.0))], 2)
    assert buffer.bucket(0) == 3


def test_a_member_without_a_verdict_keeps_a_group_from_being_solved():
    members = [completion([i]) for i in range(3)] + [completion([3], np.nan)]
    buffer = ReplayBuffer(group_size=4)
    buffer.record([Group("p", np.zeros(1, np.int32), members)], 1)
    assert buffer.bucket("p") == 3
    assert len(buffer.completions("p")) == 3


@pytest.mark.parametrize(("mark_failed", "bucket"), [(True, 0), (False, 2)])
def test_a_failed_prompt_goes_to_bucket_0_unless_told_otherwise(mark_failed, bucket):
    buffer = filled(num_prompts=1, mark_failed=mark_failed)
    buffer.record([group(0, 0), group("unknown", 0)], 2)
    assert buffer.bucket(0) == bucket
    assert buffer.bucket("unknown") is None
    assert len(buffer.draw(5, 0)) == (bucket > 0)


def test_success_threshold_is_inclusive():
    buffer = ReplayBuffer(group_size=2, success_threshold=0.7)
    members = [completion([1], 0.7), completion([2], 0.69)]
    buffer.record([Group(0, np.zeros(1, np.int32), members)], 1)
    assert [key(c)[2] for c in buffer.completions(0)] == [0.7]


def test_above_the_cap_the_oldest_are_evicted():
    buffer = filled(num_prompts=1, correct=3, max_completions_per_prompt=2)
    assert [key(c)[0] for c in buffer.completions(0)] == [(2,), (3,)]
    buffer.record([group(0, 1, first=8)], 2)
    assert [key(c)[0] for c in buffer.completions(0)] == [(3,), (8,)]
    assert buffer.num_completions == 2


def test_completions_over_the_age_are_evicted_and_prompts_without_any_leave():
    buffer = ReplayBuffer(group_size=4, seed=0, max_age=2)
    buffer.record([group("old", 2, version=1), group("mixed", 1, version=1)], 1)
    buffer.record([group("mixed", 2, version=2, first=5)], 2)
    assert {d.prompt_id for d in buffer.draw(9, weights_version=3)} == {"old", "mixed"}
    (draw,) = buffer.draw(9, weights_version=4)  # 4 - 1 > 2
    assert draw.prompt_id == "mixed"
    assert [key(c)[0] for c in draw.candidates] == [(5,), (6,)]
    assert buffer.bucket("old") is None
    assert not buffer.is_retired("old")


def test_a_share_of_the_retired_is_put_back_each_time_the_interval_passes():
    buffer = ReplayBuffer(group_size=2, seed=0, recheck_share=0.3, recheck_every=5)
    buffer.record([group(i, 2, size=2) for i in range(10)], 4)
    assert buffer.num_retired == 10
    buffer.record([], 5)
    assert buffer.num_retired == 7
    buffer.record([], 5)  # once an interval
    buffer.record([], 9)
    assert buffer.num_retired == 7
    buffer.record([], 12)  # iteration 10 was skipped
    assert buffer.num_retired == 5  # 7 - round(2.1)
    back = next(i for i in range(10) if not buffer.is_retired(i))
    buffer.record([group(back, 1, size=2)], 13)
    assert buffer.bucket(back) == 1


TORN = Completion(np.zeros(2, np.int32), np.zeros(1, np.float32), 1.0, 0)


@pytest.mark.parametrize(
    "bad",
    [
        group("short", 1, size=3),
        group("long", 1, size=5),
        Group("torn", np.zeros(1, np.int32), [TORN] * 4),
    ],
)
def test_a_malformed_group_is_refused_by_name_and_nothing_is_recorded(bad):
    buffer = ReplayBuffer(group_size=4)
    with pytest.raises(ValueError, match=repr(bad.prompt_id)):
        buffer.record([group(0, 2), bad], 1)
    assert len(buffer) == 0


def test_any_hashable_is_a_prompt_id():
    ids = [1, "1", (1, "a"), frozenset({2}), None, b"x"]
    buffer = ReplayBuffer(group_size=4)
    buffer.record([group(i, 2) for i in ids], 1)
    assert [buffer.bucket(i) for i in ids] == [2] * len(ids)


# What is drawn.


def test_draws_are_distinct_and_never_from_bucket_0():
    buffer = filled(num_prompts=20)
    buffer.record([group(i, 0) for i in range(5)], 2)
    draws = buffer.draw(100, 0)
    assert sorted(d.prompt_id for d in draws) == list(range(5, 20))


def test_a_draw_tells_its_bucket_and_probability():
    buffer = ReplayBuffer(group_size=4, seed=0)
    buffer.record([group("a", 1), group("b", 1), group("c", 2)], 1)
    # Normal(k / 4; 1 / 2, 1 / 4): exp(-1 / 2) for k = 1 against 1 for k = 2.
    share = np.exp(-0.5) / (1 + np.exp(-0.5))
    found = {d.prompt_id: (d.bucket, d.probability) for d in buffer.draw(3, 0)}
    assert found["a"] == (1, pytest.approx(share / 2))
    assert found["c"] == (2, pytest.approx(1 - share))


def test_bucket_frequencies_fit_the_formula():
    """A right implementation fails this for one seed in a million."""
    buffer = ReplayBuffer(group_size=4, seed=3)
    sizes = {1: 3, 2: 5, 3: 8}
    prompts = [(k, i) for k, size in sizes.items() for i in range(size)]
    buffer.record([group(p, p[0]) for p in prompts], 1)
    weights = {k: np.exp(-(((k - 2) / 1) ** 2) / 2) for k in sizes}
    total, num_draws = sum(weights.values()), 20_000
    seen = dict.fromkeys(prompts, 0)
    for _ in range(num_draws):
        (draw,) = buffer.draw(1, 0)
        seen[draw.prompt_id] += 1
    chi_square = 0.0
    for k, i in prompts:  # within a bucket each prompt is as likely
        expected = num_draws * weights[k] / total / sizes[k]
        chi_square += (seen[k, i] - expected) ** 2 / expected
    assert chi_square < 56.5  # upper 1e-6 quantile at 15 degrees of freedom


def test_uniform_selection_ignores_the_buckets():
    """A right implementation fails this for one seed in a million."""
    buffer = ReplayBuffer(group_size=4, seed=3, prompt_selection="uniform")
    prompts = [(k, i) for k, size in {1: 3, 2: 5, 3: 8}.items() for i in range(size)]
    buffer.record([group(p, p[0]) for p in prompts], 1)
    buffer.record([group("failed", 1), group("failed", 0)], 1)
    seen = dict.fromkeys(prompts, 0)
    num_draws = 4_000
    for _ in range(num_draws):
        draws = buffer.draw(4, 0)
        assert len({d.prompt_id for d in draws}) == 4
        for draw in draws:
            assert draw.probability == pytest.approx(1 / 16)
            seen[draw.prompt_id] += 1
    expected = num_draws * 4 / 16
    # Without replacement counts vary less than multinomial ones, by 1 - 4 / 16.
    chi_square = sum((n - expected) ** 2 / expected for n in seen.values()) / 0.75
    assert chi_square < 56.5 * 16 / 15


def test_the_same_state_draws_the_same():
    first, second = filled(num_prompts=30), filled(num_prompts=30)
    for buffer in (first, second):
        buffer.draw(3, 0)
    assert [d.prompt_id for d in first.draw(8, 0)] == [
        d.prompt_id for d in second.draw(8, 0)
    ]


def test_an_empty_buffer_draws_nothing():
    assert ReplayBuffer(group_size=4).draw(5, 0) == []
    assert ReplayBuffer(group_size=4, prompt_selection="uniform").draw(5, 0) == []


def test_the_global_generators_are_left_alone():
    np.random.seed(0)
    expected = np.random.random()
    np.random.seed(0)
    filled().draw(2, 0)
    assert np.random.random() == expected


# Which completion is chosen.


@pytest.mark.parametrize(
    ("rule", "needs", "token"),
    [
        ("lowest_entropy", "entropy", 2),
        ("highest_entropy", "entropy", 3),
        ("lowest_nll", "nll", 2),
        ("highest_nll", "nll", 3),
        ("newest", None, 3),
    ],
)
def test_selection_rules(rule, needs, token):
    buffer = filled(num_prompts=1, correct=3, completion_selection=rule)
    assert buffer.needs_scores == needs
    draws = buffer.draw(1, 0)
    scores = None if needs is None else [np.array([0.5, 0.1, 0.9])]
    (chosen,) = buffer.choose(draws, scores)
    assert chosen.completion.token_ids.tolist() == [token]


def test_random_selection_takes_each_candidate_as_often():
    """A right implementation fails this for less than one seed in a million."""
    buffer = filled(num_prompts=1, correct=3, completion_selection="random")
    tokens = [
        buffer.choose(buffer.draw(1, 0))[0].completion.token_ids.item()
        for _ in range(3000)
    ]
    counts = np.bincount(tokens)[1:]
    # Each is binomial(3000, 1 / 3), deviation 25.8; 5.2 of them is 1e-7 a side.
    assert (abs(counts - 1000) < 5.2 * 25.8).all()


def test_among_equal_scores_the_older_is_taken():
    buffer = filled(num_prompts=1, correct=3)
    (chosen,) = buffer.choose(buffer.draw(1, 0), [np.ones(3)])
    assert chosen.completion.token_ids.tolist() == [1]


def test_a_candidate_cap_offers_the_newest():
    buffer = filled(num_prompts=1, correct=3, max_candidates=2)
    (draw,) = buffer.draw(1, 0)
    assert [key(c)[0] for c in draw.candidates] == [(2,), (3,)]


def usage(buffer, prompt_id, field):
    rows = buffer.rows_of(prompt_id)
    return buffer.store.table[field][rows].tolist()


def test_replays_and_scores_are_kept_with_the_completions():
    buffer = filled(num_prompts=1, correct=2)
    for version, scores in ((4, [0.5, 0.25]), (5, [0.5, 0.75])):
        buffer.choose(buffer.draw(1, version), [np.array(scores)])
    assert usage(buffer, 0, "times_replayed") == [1, 1]
    assert usage(buffer, 0, "entropy") == [0.5, 0.75]
    assert usage(buffer, 0, "scored_version") == [5, 5]
    assert np.isnan(usage(buffer, 0, "nll")).all()


def test_scores_of_the_current_weights_are_offered_again_and_older_ones_are_not():
    buffer = filled(num_prompts=1, correct=2)
    (draw,) = buffer.draw(1, 4)
    assert np.isnan(draw.scores).all()
    buffer.choose([draw], [np.array([0.5, 0.25])])
    assert buffer.draw(1, 4)[0].scores.tolist() == [0.5, 0.25]
    buffer.record([group(0, 1, version=4, first=7)], 2)  # a newcomer has no score
    np.testing.assert_array_equal(buffer.draw(1, 4)[0].scores, [0.5, 0.25, np.nan])
    assert np.isnan(buffer.draw(1, 5)[0].scores).all()


def test_a_choice_tells_why_it_was_made():
    buffer = filled(num_prompts=1, correct=3, completion_selection="highest_entropy")
    (choice,) = buffer.choose(buffer.draw(1, 6), [np.array([0.25, 0.75, 0.5])])
    assert (choice.prompt_id, choice.bucket, choice.probability) == (0, 3, 1.0)
    assert (choice.score, choice.mean_score) == (0.75, 0.5)
    assert (choice.rank, choice.num_candidates) == (3, 3)
    assert choice.age == 6  # weights 6 now, weights 0 sampled it


def test_a_choice_without_scores_has_no_rank():
    buffer = filled(num_prompts=1, correct=2, completion_selection="newest")
    (choice,) = buffer.choose(buffer.draw(1, 0))
    assert (choice.rank, choice.num_candidates) == (0, 2)
    assert np.isnan(choice.score) and np.isnan(choice.mean_score)


def test_distinct_replayed_prompts_are_counted_once():
    buffer = filled(num_prompts=2)
    for num in (1, 2, 2):
        draws = buffer.draw(num, 0)
        buffer.choose(draws, [np.zeros(len(d.candidates)) for d in draws])
    assert buffer.get_metrics()["distinct_prompts_replayed"] == 2


def test_choosing_from_a_draw_whose_completions_are_gone_counts_nothing():
    buffer = filled(num_prompts=1, correct=2)
    draws = buffer.draw(1, 0)
    buffer.record([group(0, 4), group("new", 2)], 2)  # reuses the rows
    (chosen,) = buffer.choose(draws, [np.array([0.1, 0.2])])
    assert chosen.completion.token_ids.tolist() == [1]
    assert usage(buffer, "new", "times_replayed") == [0, 0]


@pytest.mark.parametrize(
    "scores", [None, [np.ones(2)], [np.array([1.0, np.nan, 2.0])], []]
)
def test_missing_scores_are_refused(scores):
    buffer = filled(num_prompts=1, correct=3)
    with pytest.raises(ValueError):
        buffer.choose(buffer.draw(1, 0), scores)
    assert usage(buffer, 0, "times_replayed") == [0, 0, 0]


# Knobs and state.


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("group_size", 1),
        ("sigma", 0.0),
        ("success_threshold", 0.0),
        ("success_threshold", 1.5),
        ("prompt_selection", "buckets"),
        ("completion_selection", "lowest"),
        ("max_completions_per_prompt", 0),
        ("max_age", -1),
        ("max_candidates", 0),
        ("mu", 1.5),
        ("mu", float("nan")),
        ("recheck_share", 1.1),
        ("recheck_every", -1),
    ],
)
def test_knobs_out_of_range_are_named(knob, value):
    with pytest.raises(ValueError, match=re.escape(f"`{knob}` is {value!r}")):
        ReplayBuffer(**{"group_size": 4, knob: value})


def test_metrics_are_flat_floats():
    buffer = filled(num_prompts=3)
    buffer.record([group(0, 4), group(1, 0)], 2)
    assert buffer.get_metrics() == {
        "prompts": 2.0, "completions": 4.0, "tokens": 4.0, "retired": 1.0,
        "distinct_prompts_replayed": 0.0,
        "bucket_0": 1.0, "bucket_1": 0.0, "bucket_2": 1.0, "bucket_3": 0.0,
    }  # fmt: skip


def test_a_state_stays_what_it_was_while_the_buffer_goes_on():
    buffer = filled(num_prompts=3)
    state = buffer.get_state()
    before = contents(buffer, range(4))
    buffer.record([group(0, 4), group(1, 3, first=7), group(3, 1)], 2)
    restored = ReplayBuffer(group_size=4)
    restored.set_state(state)
    assert contents(restored, range(4)) == before


def test_a_state_of_another_group_size_is_refused():
    with pytest.raises(ValueError, match="`group_size` is 8"):
        ReplayBuffer(group_size=8).set_state(filled().get_state())
