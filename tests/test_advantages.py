import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_exgrpo.advantages import group_advantages


def test_reward_minus_group_mean():
    # Mean of 1, 0, 0, 1, 1, 0, 0, 0 is 3/8.
    rewards = np.array([1, 0, 0, 1, 1, 0, 0, 0], float)
    expected = [0.625, -0.375, -0.375, 0.625, 0.625, -0.375, -0.375, -0.375]
    assert group_advantages(rewards).tolist() == expected


# Bug report 12, here and in the next test.
def test_equal_rewards_give_exactly_zero():
    for rewards in ([0.35] * 8, [1.0] * 8, [0.0] * 8):
        for normalize in (False, True):
            result = group_advantages(np.array(rewards), normalize_by_std=normalize)
            assert (result == 0).all()


def test_nearly_equal_rewards_stay_bounded_when_normalised():
    # One of eight differs: deviation of it is 7/8 and std sqrt(7)/8, so sqrt(7).
    result = group_advantages(np.array([0.35] * 7 + [0.0]), normalize_by_std=True)
    assert np.abs(result).max() == pytest.approx(np.sqrt(7))


def test_missing_verdicts_do_not_move_the_others():
    nan = np.nan
    result = group_advantages(np.array([1, nan, 0, nan]))
    assert result.tolist() == [0.5, 0.0, -0.5, 0.0]
    assert group_advantages(np.array([nan, nan, 1, nan])).tolist() == [0, 0, 0, 0]
    assert group_advantages(np.array([nan, nan])).tolist() == [0, 0]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_advantages_sum_to_zero(rewards):
    assert group_advantages(np.array(rewards)).sum() == pytest.approx(0, abs=1e-9)
