import numpy as np
import pytest

from rllib_exgrpo.prompts import PromptCycle
from rllib_exgrpo.records import Completion, Group, RolloutResult
from rllib_exgrpo.resampling import resample


def group(prompt_id, rewards, replayed=None):
    completions = [
        Completion(np.array([1], np.int32), np.zeros(1, np.float32), reward, 0)
        for reward in rewards
    ]
    return Group(prompt_id, np.array([1], np.int32), completions, replayed)


class Source:
    """Samples prompts whose rewards are known, and notes what it was asked for."""

    def __init__(self, rewards):
        self.rewards = rewards
        self.asked = []

    def draw(self, count, exclude):
        ids = [i for i in self.rewards if i not in exclude][:count]
        return ids

    def sample(self, prompt_ids, sampling_round):
        self.asked.append((sampling_round, prompt_ids))
        groups = [group(i, self.rewards[i]) for i in prompt_ids]
        # As from two env runners.
        return [RolloutResult(groups[:1], 0), RolloutResult(groups[1:], 0)]


def run(groups, cap, rewards):
    source = Source(rewards)
    result = resample(groups, cap, draw=source.draw, sample=source.sample)
    names = [[g.prompt_id for g in part] for part in (result.trained, result.replaced)]
    return names, source.asked


def test_groups_that_teach_nothing_are_replaced_until_all_teach():
    groups = [group("a", [1, 0]), group("b", [1, 1]), group("c", [0, 0])]
    names, asked = run(groups, 10, {"d": [0, 0], "e": [0, 1], "f": [1, 0]})
    # d takes b's place but teaches nothing either; f takes d's.
    assert names == [["a", "f", "e"], ["b", "c", "d"]]
    assert asked == [(1, ["d", "e"]), (2, ["f"])]


def test_the_cap_bounds_the_prompts_sampled():
    groups = [group("a", [1, 1]), group("b", [1, 1])]
    names, asked = run(groups, 3, {i: [0, 0] for i in range(9)})
    assert [len(ids) for _, ids in asked] == [2, 1]
    assert names == [[2, 1], ["a", "b", 0]]  # all are there, for the replay buffer


def test_off_by_default():
    names, asked = run([group("a", [1, 1])], 0, {"b": [0, 1]})
    assert (names, asked) == ([["a"], []], [])


def test_replayed_groups_and_those_that_teach_stay():
    stored = group("x", [1]).completions[0]
    groups = [group("a", [1, 1], replayed=stored), group("b", [1, 0])]
    names, asked = run(groups, 5, {"c": [0, 1]})
    assert (names, asked) == ([["a", "b"], []], [])


def test_groups_without_verdicts_are_replaced():
    names, _ = run([group("a", [np.nan, np.nan])], 1, {"b": [0, 1]})
    assert names == [["b"], ["a"]]


@pytest.mark.parametrize("available", [0, 1])
def test_it_ends_when_prompts_run_out(available):
    groups = [group("a", [1, 1]), group("b", [0, 0])]
    names, _ = run(groups, 9, {i: [1, 0] for i in range(available)})
    assert len(names[0]) == 2
    assert len(names[1]) == available


def test_no_prompt_comes_twice_in_a_step():
    cycle = PromptCycle(range(6), seed=0)
    groups = [group(i, [1, 1]) for i in cycle.draw(4)]
    result = resample(
        groups,
        99,
        draw=lambda count, exclude: cycle.draw(count, exclude=exclude),
        sample=lambda ids, _: [RolloutResult([group(i, [0, 0]) for i in ids], 0)],
    )
    ids = [g.prompt_id for g in result.trained + result.replaced]
    assert sorted(ids) == list(range(6))
