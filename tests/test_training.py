"""The whole algorithm on the real parts: RLlib, vLLM, PyTorch and DeepSpeed."""

import fnmatch
import shutil

import numpy as np
import pytest
from ray._private.dict import flatten_dict
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_exgrpo import ExGRPO, ExGRPOConfig
from rllib_exgrpo.envs import ArithmeticEnv, Problem, VerifiableTextEnv
from rllib_exgrpo.evaluation.questions import read_questions
from rllib_exgrpo.metric_names import METRICS


class EchoEnv(VerifiableTextEnv):
    """Takes any completion as right, or breaks on every one."""

    settings = {"broken": False}  # noqa: RUF012

    def load(self):
        return [Problem(i, f"Say {i}.", str(i)) for i in range(4)]

    def verify(self, completion, problem):
        if self.config["broken"]:
            raise KeyError("no such key")
        return 1.0


PARTITION_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def small_config(env_runners=0, learners=0, zero_stage=None) -> ExGRPOConfig:
    return (
        ExGRPOConfig()
        .environment(ArithmeticEnv, env_config={"num_problems": 24, "digits": (1, 2)})
        .language_model(max_prompt_tokens=32, max_completion_tokens=48)
        .engine(kv_cache_bytes=2**27, engine_kwargs={"enforce_eager": True})
        .training(
            lr=1e-4,
            prompts_per_step=8,
            prompts_per_update=4,
            group_size=4,
            replay_start_pass_rate=None,
            replay_buffer_config={"max_completions_per_prompt": 16},
        )
        .env_runners(num_env_runners=env_runners)
        .learners(
            num_learners=learners,
            zero_stage=zero_stage,
            deepspeed_config=PARTITION_ALL if zero_stage == 3 else {},
            max_tokens_per_micro_batch=400,
        )
        .evaluation(
            evaluation_interval=2,
            evaluation_config={"env_config": {"split": "heldout", "num_problems": 10}},
            evaluation_temperature=0.0,
            evaluation_sets={"easy": {"env_config": {"num_problems": 6}, "samples": 2}},
        )
        .debugging(seed=7)
    )


def weights_of(algo) -> dict[str, np.ndarray]:
    state = algo.learner_group.get_weights()[DEFAULT_MODULE_ID]
    return {name: np.array(value) for name, value in state.items()}


def missing_metrics(result) -> list[str]:
    """Documented metrics that a first result lacks; `*` stands for any name."""
    paths = flatten_dict(result, delimiter="/")
    return [
        pattern
        for pattern in METRICS
        # An evaluation follows later; scores by source need several sources, and
        # majorities several samples, which only the named set has.
        if not pattern.startswith(("evaluation/", "evaluation_at_start/maj_at"))
        and not pattern.endswith("_of_*")
        and not fnmatch.filter(paths, pattern)
    ]


@pytest.mark.parametrize(
    ("env_runners", "learners", "zero_stage"),
    [(0, 0, None), (1, 0, None), (2, 1, 1), (1, 2, 3)],
)
def test_training_evaluation_and_restore(
    ray_session, tmp_path, env_runners, learners, zero_stage
):
    config = small_config(env_runners, learners, zero_stage)
    algo = config.build_algo()
    before = weights_of(algo)
    first, second = algo.train(), algo.train()

    # The first step has no experience yet, the second replays some.
    assert first["replay"]["num_prompts_replayed"] == 0
    assert second["replay"]["num_prompts_replayed"] > 0
    learner = second["learners"][DEFAULT_MODULE_ID]
    # Fresh tokens: both engines see the same weights.
    assert learner["rollout_logp_diff_max"] < 1e-4
    # Replayed ones were sampled before the weights moved.
    assert learner["importance_ratio_replayed_mean"] != pytest.approx(1.0, abs=1e-7)
    assert any((before[n] != w).any() for n, w in weights_of(algo).items())
    # Each prompt once, nothing of it in the training counters.
    assert second["evaluation"]["num_prompts"] == 10
    assert second["evaluation"]["num_completions"] == 10
    assert second["evaluation"]["easy"]["num_completions"] == 12
    asked = [(q.evaluation_set, q.prompt_id) for q in algo.evaluator.questions]
    assert len(set(asked)) == len(asked) == 16
    kept = read_questions(algo.logdir)
    assert {q.iteration for q in kept[:16]} == {0}
    assert kept[16:] == algo.evaluator.questions
    assert {q.iteration for q in kept[16:]} == {2}
    lifetime = second["env_runners"]["num_env_steps_sampled_lifetime"]
    assert lifetime == sum(r["env_runners"]["num_completions"] for r in (first, second))
    assert missing_metrics(first) == []  # all there from the first iteration

    algo.save_to_path(str(tmp_path / "checkpoint"))
    third = algo.train()
    after = weights_of(algo)
    # Going back in place brings the older weights back, in the engines too.
    algo.restore_from_path(str(tmp_path / "checkpoint"))
    again = algo.train()
    assert again["env_runners"]["pass_rate"] == third["env_runners"]["pass_rate"]
    assert again["learners"][DEFAULT_MODULE_ID]["rollout_logp_diff_max"] < 1e-4
    for name, weight in weights_of(algo).items():
        np.testing.assert_array_equal(weight, after[name])
    algo.stop()


@pytest.mark.parametrize(
    ("env_runners", "learners", "zero_stage"),
    [(0, 0, None), pytest.param(1, 2, 3, marks=pytest.mark.slow)],
)
def test_a_new_algorithm_continues_from_a_checkpoint(
    ray_session, tmp_path, env_runners, learners, zero_stage
):
    first = small_config(env_runners, learners, zero_stage).build_algo()
    first.train()
    # The folder moves: nothing in it may hold on to where it was written.
    first.save_to_path(str(tmp_path / "written"))
    shutil.move(tmp_path / "written", tmp_path / "checkpoint")
    expected = first.train()
    weights = weights_of(first)
    first.stop()

    second = ExGRPO.from_checkpoint(str(tmp_path / "checkpoint"))
    resumed = second.train()
    assert resumed["training_iteration"] == 2
    assert resumed["replay"]["completions"] == expected["replay"]["completions"]
    for name, weight in weights_of(second).items():
        np.testing.assert_array_equal(weight, weights[name])
    second.stop()


def test_a_checkpoint_of_other_learners_is_refused(ray_session, tmp_path):
    algo = small_config().build_algo()
    algo.save_to_path(str(tmp_path / "checkpoint"))
    algo.config = algo.config.copy(copy_frozen=False).learners(
        num_learners=2, zero_stage=1
    )
    with pytest.raises(ValueError, match="`num_learners`=0 and this .*=2"):
        algo.restore_from_path(str(tmp_path / "checkpoint"))
    algo.config = small_config()
    algo.stop()


def echo_config(**env_config) -> ExGRPOConfig:
    config = small_config().evaluation(evaluation_interval=None, evaluation_config={})
    config.env_config = env_config  # `environment` would merge it into the old one
    return config.environment(EchoEnv)


def test_training_ends_when_every_prompt_is_solved(ray_session):
    algo = echo_config().build_algo()
    results = [algo.train(), algo.train()]
    # Four prompts, all of whose groups are right at once: one step, then the end.
    assert [r["done"] for r in results] == [False, True]
    assert results[0]["replay"]["retired"] == 4
    assert results[0]["env_runners"]["pass_rate"] == 1.0
    algo.stop()


def test_a_broken_verifier_stops_training_with_its_error(ray_session):
    algo = echo_config(broken=True).build_algo()
    with pytest.raises(RuntimeError, match="verifier of EchoEnv failed.*no such key"):
        algo.train()
    algo.stop()
