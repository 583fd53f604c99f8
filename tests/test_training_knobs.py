"""Knobs of the loss in a whole algorithm; values by hand are in the unit tests."""

import logging

import pytest
from ray.rllib.core import DEFAULT_MODULE_ID
from test_training import echo_config, missing_metrics, small_config


def test_the_learner_recomputes_and_corrects_behavior_log_probs(ray_session, caplog):
    config = small_config().training(
        entropy_coeff=0.0,
        loss_aggregation="token_mean",
        behavior_logp_source="learner",
        rollout_correction_cap=2.0,
        rollout_correction_range=(0.5, 2.0),
        max_rollout_logp_diff=1e-12,  # float32 differs by more
        max_resampled_prompts=3,
    )
    algo = config.evaluation(evaluation_interval=None).build_algo()
    with caplog.at_level(logging.WARNING, logger="rllib_exgrpo"):
        results = [algo.train(), algo.train()]
    algo.stop()
    assert missing_metrics(results[0]) == []
    for result in results:
        learner = result["learners"][DEFAULT_MODULE_ID]
        # The engine's log-probs are still compared with the learner's.
        assert 0 < learner["rollout_logp_diff_mean"] < 1e-5
        assert learner["rollout_correction_mean"] == pytest.approx(1.0, abs=1e-4)
        assert learner["num_tokens_left_out"] == 0
        runners = result["env_runners"]
        assert runners["num_prompts"] == 8 + runners["num_prompts_resampled"]
    # Bug report 21: one warning a run.
    warnings = [r for r in caplog.records if "max_rollout_logp_diff" in r.message]
    assert len(warnings) == 1


def test_the_buffer_sees_prompts_whose_groups_were_replaced(ray_session):
    config = echo_config().training(
        prompts_per_step=2,
        prompts_per_update=2,
        max_resampled_prompts=4,
        skip_zero_advantage_groups=True,
    )
    algo = config.build_algo()
    result = algo.train()
    algo.stop()
    # All completions are right: the two groups are replaced by the other two prompts,
    # which are all there are. All four retire, and 2 * 4 completions train nothing.
    assert result["env_runners"]["num_prompts_resampled"] == 2
    assert result["replay"]["retired"] == 4
    assert result["learners"][DEFAULT_MODULE_ID]["num_completions_skipped"] == 8
    assert result["env_runners"]["num_env_steps_sampled_lifetime"] == 16
