"""The whole algorithm on the real parts: RLlib, vLLM, PyTorch and DeepSpeed."""

import fnmatch
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import resume_worker
import torch
from ray._private.dict import flatten_dict
from ray.rllib.core import DEFAULT_MODULE_ID
from resume_worker import train_and_record, weights_of
from transformers import AutoModelForCausalLM

from rllib_exgrpo import ExGRPO, ExGRPOConfig
from rllib_exgrpo.cli import main
from rllib_exgrpo.envs import ArithmeticEnv, Problem, VerifiableTextEnv
from rllib_exgrpo.evaluation.questions import read_questions
from rllib_exgrpo.metric_names import METRICS
from rllib_exgrpo.replay.audit import AUDIT_FOLDER, Audit
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.replay.summary import export_rows


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
    # The audit has a row for each; over all learners they add up to the metrics.
    audit = audit_of(algo)
    assert audit.num_rows == second["replay"]["num_prompts_replayed"]
    for column, metric in (
        ("importance_ratio", "importance_ratio_replayed_mean"),
        ("saturated", "replayed_saturated_fraction"),
    ):
        mean = np.average(audit[column], weights=audit["tokens"])
        assert mean == pytest.approx(learner[metric], rel=1e-5)
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


def assert_same_steps(expected, actual):
    for before, after in zip(expected, actual, strict=True):
        assert before["prompts"] == after["prompts"]
        assert before["seeds"] == after["seeds"]
        assert before["metrics"].keys() == after["metrics"].keys()
        for name, value in before["metrics"].items():
            np.testing.assert_equal(after["metrics"][name], value, err_msg=name)


@pytest.mark.parametrize(
    ("env_runners", "learners", "zero_stage"),
    [
        (0, 0, None),
        pytest.param(1, 0, None, marks=pytest.mark.slow),
        pytest.param(1, 2, 3, marks=pytest.mark.slow),
    ],
)
def test_a_new_process_continues_as_if_nothing_had_happened(
    ray_session, tmp_path, env_runners, learners, zero_stage
):
    config = small_config(env_runners, learners, zero_stage)
    config.training(lr=[[0, 1e-5], [256, 2e-4]])
    algo = config.build_algo()
    first = train_and_record(algo)
    # The folder moves: nothing in it may hold on to where it was written.
    algo.save_to_path(str(tmp_path / "written"))
    shutil.move(tmp_path / "written", tmp_path / "checkpoint")
    expected = [train_and_record(algo) for _ in range(2)]
    weights = weights_of(algo)
    algo.stop()

    arguments = [tmp_path / "checkpoint", "2", tmp_path / "out"]
    subprocess.run(
        [sys.executable, resume_worker.__file__, *map(str, arguments)],
        cwd=Path(__file__).parents[1],
        check=True,
    )
    steps, resumed = pickle.loads((tmp_path / "out").read_bytes())
    assert_same_steps(expected, steps)
    for name, weight in resumed.items():
        np.testing.assert_array_equal(weight, weights[name])
    # The schedule: the rate at the completions sampled before the step.
    metrics = [step["metrics"] for step in (first, *steps)]
    sampled = [0, *(m["env_runners/num_env_steps_sampled_lifetime"] for m in metrics)]
    rates = [m[f"learners/{DEFAULT_MODULE_ID}/learning_rate"] for m in metrics]
    slope = (2e-4 - 1e-5) / 256
    assert rates == pytest.approx([1e-5 + slope * n for n in sampled[:3]])


@pytest.mark.slow
@pytest.mark.parametrize("learners", [(0, None, 2, 3), (2, 3, 0, None), (2, 3, 1, 2)])
def test_a_checkpoint_continues_with_other_learners(ray_session, tmp_path, learners):
    saved, saved_stage, own, own_stage = learners
    path = str(tmp_path / "checkpoint")
    first = small_config(0, saved, saved_stage).build_algo()
    first.train()
    first.save_to_path(path)
    first.train()
    expected = weights_of(first)
    first.stop()
    second = small_config(0, own, own_stage).build_algo()
    second.restore_from_path(path)
    second.train()
    for name, weight in weights_of(second).items():
        # A fresh optimiser would move every weight by about the rate of 1e-4.
        np.testing.assert_allclose(weight, expected[name], atol=2e-6)
    second.stop()


@pytest.mark.slow
def test_a_resumed_run_replays_what_the_undisturbed_one_does(ray_session, tmp_path):
    first = small_config().build_algo()
    first.train()
    first.save_to_path(str(tmp_path / "checkpoint"))
    for _ in range(3):
        first.train()
    weights, experience = weights_of(first), list(export_rows(first.replay_buffer))
    replayed = audit_of(first)
    first.stop()

    second = ExGRPO.from_checkpoint(str(tmp_path / "checkpoint"))
    results = [second.train() for _ in range(3)]
    assert [r["training_iteration"] for r in results] == [2, 3, 4]
    for name, weight in weights_of(second).items():
        np.testing.assert_array_equal(weight, weights[name])
    # The same prompts and completions, for the same reasons, to the last bit.
    assert replayed["iteration"].unique().to_pylist() == [2, 3, 4]
    assert audit_of(second).equals(replayed)
    assert list(export_rows(second.replay_buffer)) == experience
    # Going back makes the audit forget what is to come.
    second.restore_from_path(str(tmp_path / "checkpoint"))
    assert audit_of(second).num_rows == 0
    second.stop()


def audit_of(algo):
    return Audit(Folder.at(f"{algo.logdir}/{AUDIT_FOLDER}")).read()


def test_a_run_starts_from_the_experience_of_another(ray_session, tmp_path):
    first = small_config().build_algo()
    first.train()
    first.save_to_path(str(tmp_path / "first"))
    prompts = first.replay_buffer.get_metrics()["prompts"]
    first.stop()
    config = small_config().training(replay_buffer_config={"warm_start": tmp_path})
    second = config.build_algo()
    result = second.train()
    assert prompts > 0
    assert result["replay"]["num_prompts_replayed"] > 0
    # One step, one version of weights: it counts as version 0, that of the new run.
    assert result["replay"]["age_p90"] == 0
    second.save_to_path(str(tmp_path / "second"))
    second.stop()
    # The checkpoint stands for itself.
    shutil.rmtree(tmp_path / "first")
    third = ExGRPO.from_checkpoint(str(tmp_path / "second"))
    assert len(third.replay_buffer) == result["replay"]["prompts"]
    third.stop()


def test_an_exported_checkpoint_is_the_learners_model(ray_session, tmp_path):
    algo = small_config().build_algo()
    algo.train()
    algo.save_to_path(str(tmp_path / "checkpoint"))
    ids = torch.arange(5, 25).reshape(2, 10)
    with torch.no_grad():
        learner = algo.learner_group._learner.module[DEFAULT_MODULE_ID]
        expected = learner.policy.model(ids).logits
    algo.stop()
    folder = tmp_path / "model"
    assert main(["export", str(tmp_path / "checkpoint"), str(folder)]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)
    card = (folder / "README.md").read_text()
    assert "for 1 steps" in card
    assert '"prompts_per_step": 8' in card
    assert "ArithmeticEnv" in card
    assert main(["export", str(tmp_path / "checkpoint"), str(folder)]) == 2


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
