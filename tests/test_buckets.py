import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_exgrpo.buckets import (
    bucket_probabilities,
    draw_bucket_counts,
    spread_buckets,
)

# Normal density at k / 8 with mean 0.5 and deviation 1 / 8, times 1 / 8: the standard
# normal density at 0, 1, 2, 3 is 0.3989, 0.2420, 0.0540, 0.0044.
DENSITY_8 = np.array([0.0044, 0.0540, 0.2420, 0.3989, 0.2420, 0.0540, 0.0044])


def test_default_weights_are_the_normal_density_in_counts():
    np.testing.assert_allclose(
        bucket_probabilities(8), DENSITY_8 / DENSITY_8.sum(), atol=5e-5
    )


def test_sigma_is_in_pass_rate_units():
    # sigma = 1, as the paper's text says: exp(-(k/8 - .5)^2 / 2), k = 4 against k = 1.
    weights = bucket_probabilities(8, sigma=1.0)
    assert weights[3] / weights[0] == pytest.approx(np.exp(0.375**2 / 2))


def test_mu_moves_the_peak():
    assert bucket_probabilities(8, mu=0.25).argmax() == 1  # k = 2


def test_empty_buckets_get_nothing_and_the_rest_is_renormalised():
    weights = bucket_probabilities(4, occupied=[True, False, True])
    np.testing.assert_allclose(weights, [0.5, 0.0, 0.5])  # k = 1, 3 are symmetric


def test_no_occupied_bucket_gives_zeros():
    assert not bucket_probabilities(4, occupied=[False] * 3).any()


def test_a_far_bucket_is_drawn_when_it_is_the_only_one():
    # Its density, exp(-(0.375 / 1e-4)^2 / 2), is zero in float64.
    occupied = np.arange(1, 8) == 7
    weights = bucket_probabilities(8, sigma=1e-4, occupied=occupied)
    np.testing.assert_array_equal(weights, occupied.astype(float))


def test_two_completions_make_one_bucket():
    np.testing.assert_array_equal(bucket_probabilities(2), [1.0])


@pytest.mark.parametrize(
    ("arguments", "knob"),
    [
        ({"group_size": 1}, "`group_size` is 1"),
        ({"group_size": 8, "sigma": 0.0}, "`sigma` is 0.0"),
        ({"group_size": 8, "sigma": -1.0}, "`sigma` is -1.0"),
        ({"group_size": 8, "mu": float("nan")}, "`mu` is nan"),
        ({"group_size": 8, "occupied": [True] * 8}, "`occupied` has shape (8,)"),
    ],
)
def test_bad_knobs_are_named(arguments, knob):
    with pytest.raises(ValueError, match=re.escape(knob)):
        bucket_probabilities(**arguments)


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=15),
    num_draws=st.integers(0, 80),
    sigma=st.none() | st.floats(1e-3, 10.0),
    mu=st.floats(-1.0, 2.0),
    seed=st.integers(0, 2**32),
)
def test_counts_fit_the_buckets_and_nothing_is_lost(sizes, num_draws, sigma, mu, seed):
    rng = np.random.default_rng(seed)
    counts = draw_bucket_counts(rng, num_draws, sizes, mu, sigma)
    assert (counts >= 0).all()
    assert (counts <= sizes).all()
    assert counts.sum() == min(num_draws, sum(sizes))


def test_excess_goes_to_the_other_buckets_by_the_same_weights():
    # k = 2 of G = 4 has one prompt and most of the weight; what exceeds it is shared
    # by k = 1 and 3 evenly. Mean of each: (1000 - 1) / 2, deviation < sqrt(1000) / 2.
    rng = np.random.default_rng(0)
    counts = draw_bucket_counts(rng, 1000, [10_000, 1, 10_000])
    assert counts[1] == 1
    assert abs(counts[0] - 499.5) < 5 * np.sqrt(1000) / 2


def test_counts_follow_the_weights():
    """A right implementation fails this for one seed in a million."""
    rng = np.random.default_rng(7)
    num_draws = 200_000
    counts = draw_bucket_counts(rng, num_draws, [num_draws] * 7)
    expected = num_draws * bucket_probabilities(8)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 38.26  # upper 1e-6 quantile at 6 degrees of freedom


@pytest.mark.parametrize(
    ("spreads", "group_size", "expected"),
    [
        # Scaled to 0, 1/2, 1; times 4; the last stays below 4, the solved prompts'.
        ([0.0, 0.25, 0.5], 4, [0, 2, 3]),
        # Scaled to 1/4, 1, 0; times 8.
        ([0.2, 0.5, 0.1], 8, [2, 7, 0]),
        ([0.3, 0.3], 8, [0, 0]),  # nothing tells them apart
        ([0.3], 8, [0]),
        ([], 8, []),
    ],
)
def test_buckets_by_reward_spread(spreads, group_size, expected):
    assert spread_buckets(spreads, group_size).tolist() == expected
