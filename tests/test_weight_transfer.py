"""Weights by vLLM's own transfer, with a store in place of NCCL."""

import os

import numpy as np
import pytest
import torch
from test_faults import kill_between
from test_training import small_config, weights_of

from rllib_exgrpo import ExGRPOConfig, learner_checks
from rllib_exgrpo.envs import ArithmeticEnv
from rllib_exgrpo.weight_transfer import EngineClient, WeightMetadata, WeightSource


class Recorder:
    def __init__(self):
        self.calls = []

    def __call__(self, step, arguments):
        self.calls.append((step, arguments))


def test_the_workers_of_all_engines_get_ranks_of_their_own():
    recorder = Recorder()
    client = EngineClient(recorder, num_engines=3, workers_per_engine=2)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7})
    ((step, arguments),) = recorder.calls
    assert step == "init_weight_transfer_engine"
    # The sender is 0; two workers each: 1 and 2, 3 and 4, 5 and 6.
    assert [info["rank_offset"] for (info,) in arguments] == [1, 3, 5]
    assert {info["world_size"] for (info,) in arguments} == {7}


def test_without_ranks_all_engines_get_the_same():
    recorder = Recorder()
    client = EngineClient(recorder, num_engines=2, workers_per_engine=1)
    client.init_weight_transfer_engine({"packed": False})
    client.start_weight_update()
    client.update_weights({"names": []})
    client.finish_weight_update("7")
    assert recorder.calls == [
        ("init_weight_transfer_engine", [({"packed": False},)] * 2),
        ("start_weight_update", [()] * 2),
        ("update_weights", [({"names": []},)] * 2),
        ("finish_weight_update", [()] * 2),
    ]


def test_a_source_can_be_read_again_and_again():
    class Weights:
        def inference_metadata(self):
            return [WeightMetadata("a", torch.float32, (2,))]

        def inference_weights(self):
            yield "a", torch.ones(2)

    source = WeightSource(Weights())
    for _ in range(2):
        for meta, (name, tensor) in zip(source.metadata(), source, strict=True):
            assert meta == (name, tensor.dtype, tuple(tensor.shape))


@pytest.mark.parametrize(
    ("env_runners", "learners", "gpus", "words"),
    [
        (0, 1, 1, "`num_env_runners` is 0"),
        (1, 0, 1, "`num_learners` is 0"),
        (1, 1, 0, "needs GPUs"),
    ],
)
def test_settings_that_cannot_transfer_are_refused(env_runners, learners, gpus, words):
    config = (
        ExGRPOConfig()
        .environment(ArithmeticEnv)
        .engine(weight_transfer="nccl")
        .env_runners(num_env_runners=env_runners, num_gpus_per_env_runner=gpus)
        .learners(num_learners=learners, num_gpus_per_learner=gpus)
    )
    with pytest.raises(ValueError, match=f"`weight_transfer` is 'nccl'.*{words}"):
        config.validate()


def store_config(env_runners, learners, zero_stage):
    from transfer_helpers import StoreEnvRunner, StoreLearner

    return (
        small_config(env_runners, learners, zero_stage)
        .evaluation(evaluation_interval=None, evaluation_config={}, evaluation_sets={})
        .engine(weight_transfer="nccl")
        .env_runners(env_runner_cls=StoreEnvRunner)
        .learners(learner_class=StoreLearner)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_runners", "learners", "zero_stage"), [(1, 1, None), (2, 2, 3)]
)
def test_engines_sample_with_the_weights_that_were_sent(
    ray_session, monkeypatch, env_runners, learners, zero_stage
):
    pytest.importorskip("vllm")
    # There are no GPUs here, and the store needs none.
    monkeypatch.setattr(learner_checks, "_transfer_faults", lambda config: ())
    config = store_config(env_runners, learners, zero_stage)
    by_store = config.copy(copy_frozen=False).engine(weight_transfer="object_store")
    results, weights = [], []
    for each in (config, by_store):
        algo = each.build_algo()
        results += [algo.train(), algo.train()]
        weights.append(weights_of(algo))
        if each is config:  # a restarted engine needs a new group
            pids = algo.env_runner_group.foreach_env_runner(
                lambda runner: os.getpid(), local_env_runner=False
            )
            kill_between(algo, "_choose_replayed", pids[:1])
            results.append(algo.train())
        algo.stop()
    for result in results:
        learner = result["learners"]["default_policy"]
        assert learner["rollout_logp_diff_max"] < 1e-4
    for name, sent in weights[0].items():
        np.testing.assert_array_equal(sent, weights[1][name])
