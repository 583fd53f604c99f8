"""Knobs of the loss in a whole algorithm; values by hand are in the unit tests."""

import logging

import pytest
from ray.rllib.core import DEFAULT_MODULE_ID
from test_training import audit_of, echo_config, missing_metrics, small_config

from rllib_exgrpo.envs import Problem, VerifiableTextEnv


class LearntAtOnceEnv(VerifiableTextEnv):
    """Takes half of the first completions as right, then all."""

    def load(self):
        self.num_judged = 0
        return [Problem(i, f"Say {i}.", str(i)) for i in range(4)]

    def verify(self, completion, problem):
        self.num_judged += 1
        return float(self.num_judged % 2 or self.num_judged > 4 * 4)


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
    missing = missing_metrics(results[0])
    assert [name for name in missing if not name.startswith("evaluation")] == []
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


def test_solved_prompts_are_replayed_though_they_teach_nothing(ray_session):
    config = echo_config().environment(LearntAtOnceEnv)
    config = config.training(
        prompts_per_step=4,
        prompts_per_update=2,
        replay_start_pass_rate=None,
        entropy_coeff=0.0,  # groups without advantages are left out
    )
    algo = config.build_algo()
    first, second = algo.train(), algo.train()
    algo.stop()
    assert first["env_runners"]["pass_rate"] == 0.5
    # Two of the four are replayed, and all completions are right: all advantages are 0.
    assert second["replay"]["num_prompts_replayed"] == 2
    assert second["replay"]["retired"] == 4
    learner = second["learners"][DEFAULT_MODULE_ID]
    assert learner["num_completions_skipped"] == 4 * 4
    assert audit_of(algo)["tokens"].to_pylist() == [0, 0]
