"""RLlib's view of completions: single-step episodes."""

import numpy as np
import pytest
from ray.rllib.core.columns import Columns
from test_training import small_config

from rllib_exgrpo.envs import ArithmeticEnv
from rllib_exgrpo.exgrpo_env_runner import ExGRPOEnvRunner
from rllib_exgrpo.exgrpo_episodes import episodes_from_group
from rllib_exgrpo.policy import load_tokenizer
from rllib_exgrpo.records import Completion, Group


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-arithmetic")


def test_an_episode_is_one_prompt_one_completion_and_its_reward(tokenizer):
    prompt = np.array(tokenizer("1 + 2\n").input_ids, np.int32)
    ids = np.array([*tokenizer("3").input_ids, tokenizer.eos_token_id], np.int32)
    logp = np.array([-0.5, -0.25], np.float32)
    completions = [Completion(ids, logp, reward, 7, iteration=3) for reward in (1, 0.5)]
    group = Group("p1", prompt, completions, source="sums")
    episodes = episodes_from_group(group, tokenizer)
    assert [e.get_return() for e in episodes] == [1, 0.5]
    episode = episodes[0]
    assert len(episode) == episode.env_steps() == 1
    assert episode.is_terminated
    assert episode.get_observations() == ["1 + 2\n", ""]
    assert episode.get_actions() == ["3"]
    assert episode.get_infos(0) == {"prompt_id": "p1", "source": "sums"}
    assert episode.get_infos(-1)["truncated"] is False
    outputs = episode.extra_model_outputs
    np.testing.assert_array_equal(outputs["token_ids"][0], ids)
    np.testing.assert_array_equal(outputs["prompt_token_ids"][0], prompt)
    np.testing.assert_array_equal(outputs[Columns.ACTION_LOGP][0], logp)
    assert outputs["weights_seq_no"][0] == 7


def test_sample_returns_as_many_episodes_as_asked_for():
    config = small_config()
    runner = ExGRPOEnvRunner(
        config=config, env_creator=ArithmeticEnv, worker_index=0, num_workers=0
    )
    episodes = runner.sample(num_episodes=10)  # groups of 4: three prompts
    greedy = runner.sample(num_episodes=4, explore=False)
    metrics = runner.get_metrics()
    runner.stop()
    assert len(episodes) == 10
    assert len({e.get_observations(0) for e in episodes}) == 3
    for episode in episodes:
        assert episode.get_return() in (0, 1)
        (ids,) = episode.extra_model_outputs["token_ids"]
        (logp,) = episode.extra_model_outputs[Columns.ACTION_LOGP]
        assert 0 < len(ids) == len(logp) <= 48
        assert (logp <= 0).all()
    assert len({e.get_actions(0) for e in greedy}) == 1
    assert metrics["num_episodes"] is not None
