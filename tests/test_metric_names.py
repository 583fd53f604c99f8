"""Metric names: every metric we log is in the table, and typos find their way."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_exgrpo.evaluation.metrics import evaluation_metrics
from rllib_exgrpo.evaluation.questions import question_from_group
from rllib_exgrpo.exgrpo_replay import ExGRPOReplayBuffer
from rllib_exgrpo.loss_metrics import summarize
from rllib_exgrpo.metric_names import (
    METRICS,
    check_stop,
    find_metric,
    is_met,
    nearest_metric,
    value_of,
)
from rllib_exgrpo.records import Completion, Group, RolloutResult
from rllib_exgrpo.rollout_metrics import rollout_metrics


def group(prompt_id, source):
    completions = [
        Completion(np.array([1, 2], np.int32), np.zeros(2, np.float32), reward, 0)
        for reward in (0.0, 1.0)
    ]
    return Group(
        prompt_id,
        np.array([1], np.int32),
        completions,
        source=source,
        reasons=["wrong", "ok"],
        answers=["1", "2"],
    )


def evaluated(groups):
    return evaluation_metrics(
        [
            question_from_group(
                g, evaluation_set="", iteration=0, success_threshold=1.0
            )
            for g in groups
        ]
    )


def test_metrics_of_rollouts_evaluations_and_the_buffer_are_in_the_table():
    groups = [group("a", "amc"), group("b", "aime")]
    results = [RolloutResult(groups, 0)]
    logged = {
        "env_runners": rollout_metrics(groups, [results], success_threshold=1.0),
        "evaluation": evaluated(groups),
        "evaluation/named": evaluated(groups),
        "evaluation_at_start": evaluated(groups),
        "replay": ExGRPOReplayBuffer(group_size=8).get_metrics(),
    }
    names = [f"{key}/{name}" for key, metrics in logged.items() for name in metrics]
    assert [n for n in names if find_metric(n) is None] == []
    assert {"evaluation/maj_at_2_low_of_amc", "replay/bucket_7"} <= set(names)
    assert logged["env_runners"]["verdict_ok_fraction"] == 0.5


def test_groups_that_teach_nothing_are_counted():
    # Bug report 12: three of four groups have one reward throughout, 0.35 among them.
    def of(rewards):
        completions = [
            Completion(np.array([1], np.int32), np.zeros(1, np.float32), reward, 0)
            for reward in rewards
        ]
        return Group("a", np.array([1], np.int32), completions)

    groups = [of([0.35] * 8), of([1.0] * 8), of([0.0] * 8), of([0.35] * 7 + [0.0])]
    metrics = rollout_metrics(groups, [], success_threshold=1.0)
    assert metrics["zero_advantage_group_fraction"] == 0.75


def test_latencies_and_time_outs_of_the_verifier_are_reported():
    # 100 completions took 1 to 100 ms: half of them at most 50 ms, or 51 as the higher
    # of the two in the middle; 1 % took more than 99 ms, the next of which is 100.
    completion = Completion(np.array([1], np.int32), np.zeros(1, np.float32), 0.0, 0)
    parts = {"amc": range(1, 51), "aime": range(51, 101)}
    groups = [
        Group(
            source,
            np.array([1], np.int32),
            [completion] * 50,
            source=source,
            reasons=["timeout" if ms > 98 else "wrong" for ms in part],
            verify_seconds=[ms / 1000 for ms in part],
        )
        for source, part in parts.items()
    ]
    metrics = rollout_metrics(groups, [], success_threshold=1.0)
    assert metrics["verifier_latency_p50_s"] == 0.051
    assert metrics["verifier_latency_p99_s"] == 0.1
    assert (metrics["num_timeouts_amc"], metrics["num_timeouts_aime"]) == (0, 2)


def test_rounds_of_resampling_take_their_time_one_after_the_other():
    groups = [group("a", "amc"), group("b", "amc"), group("c", "amc")]
    rounds = [
        [
            RolloutResult(groups[:1], 0, {"generate": 3.0}),
            RolloutResult(groups[1:2], 0, {"generate": 1.0}),
        ],
        [RolloutResult(groups[2:], 0, {"generate": 2.0})],
    ]
    metrics = rollout_metrics(groups, rounds, success_threshold=1.0)
    assert metrics["generate_s"] == 5.0  # the slower of two, then the second round
    assert metrics["num_prompts_resampled"] == 1


def test_metrics_of_the_learner_are_in_the_table():
    metrics = summarize(defaultdict(float), num_updates=1)
    names = [f"learners/default_policy/{name}" for name in metrics]
    assert [n for n in names if find_metric(n) is None] == []


def test_every_metric_has_a_meaning():
    assert all(metric.meaning for metric in METRICS.values())
    assert METRICS["time_total_s"].unit == "s"


def test_check_stop_takes_paths_and_nested_dicts():
    stop = {"training_iteration": 3, "env_runners": {"pass_rate": 0.9}}
    assert check_stop(stop) == {"training_iteration": 3, "env_runners/pass_rate": 0.9}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("training_iterations", "training_iteration"),
        ("time_total", "time_total_s"),
        ("pass_rate", "env_runners/pass_rate"),
        ("env_runner/pass_rate", "env_runners/pass_rate"),
        ("evaluation/pass@1", "evaluation/pass_at_1"),
        ("eval/pass_at_1", "evaluation/pass_at_1"),
        ("replay/num_retired", "replay/retired"),
        ("learner/default_policy/entropy", "learners/default_policy/entropy"),
        ("episode_reward_mean", "env_runners/episode_return_mean"),
        ("timesteps_total", "num_env_steps_sampled_lifetime"),
    ],
)
def test_a_typo_is_refused_with_the_nearest_name(wrong, right):
    with pytest.raises(ValueError, match=f"'{wrong}'.*'{right}'"):
        check_stop({wrong: 1})


@pytest.mark.parametrize("value", ["10", None, True, [1]])
def test_a_value_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="training_iteration"):
        check_stop({"training_iteration": value})


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(n for n in METRICS if "*" not in n)), st.data())
def test_a_lost_character_is_found(name, data):
    typo = data.draw(st.sampled_from(losses(name)))
    # The name itself or, as for `age_p0`, another that has lost one character.
    assert find_metric(typo) or typo in losses(nearest_metric(typo))


def losses(name):
    return [name[:i] + name[i + 1 :] for i in range(len(name))]


def test_a_criterion_is_met_at_its_value_and_ignored_where_it_is_missing():
    stop = {"training_iteration": 3, "evaluation/pass_at_1": 0.9}
    assert not is_met(stop, {"training_iteration": 2})
    assert is_met(stop, {"training_iteration": 3})
    assert is_met(stop, {"training_iteration": 1, "evaluation": {"pass_at_1": 0.95}})


def test_value_of_walks_nested_results():
    result = {"a": {"b": 3}}
    assert value_of(result, "a/b") == 3
    assert value_of(result, "a/c") is None
    assert value_of(result, "a/b/c") is None
