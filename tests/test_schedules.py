import math

import pytest
from ray.rllib.utils.schedules.scheduler import Scheduler

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import ArithmeticEnv
from rllib_exgrpo.schedules import cosine_schedule


def test_a_cosine_with_warm_up_through_rllibs_scheduler():
    schedule = cosine_schedule(1e-5, 10_000, warmup=1_000, final=1e-6)
    ExGRPOConfig().environment(ArithmeticEnv).training(lr=schedule).validate()
    scheduler = Scheduler(schedule)
    assert scheduler.update(0) == 0.0
    assert scheduler.update(250) == pytest.approx(2.5e-6)  # a quarter of the rise
    assert scheduler.update(1_000) == pytest.approx(1e-5)
    for done in (1_777, 4_321, 5_500, 9_123):
        share = (done - 1_000) / 9_000
        expected = 1e-6 + 9e-6 * (1 + math.cos(math.pi * share)) / 2
        assert scheduler.update(done) == pytest.approx(expected, abs=1e-8)
    assert scheduler.update(10_000) == pytest.approx(1e-6)
    assert scheduler.update(99_999) == pytest.approx(1e-6)  # and stays there


def test_without_warm_up_it_starts_at_the_peak():
    times, rates = zip(*cosine_schedule(2.0, 4, num_points=2), strict=True)
    assert times == (0, 2, 4)
    assert rates == pytest.approx((2.0, 1.0, 0.0))


@pytest.mark.parametrize(("warmup", "num_points"), [(10, 2), (0, 11), (-1, 2)])
def test_an_impossible_cosine_is_refused(warmup, num_points):
    with pytest.raises(ValueError, match="the warm-up must end before"):
        cosine_schedule(1.0, 10, warmup=warmup, num_points=num_points)
