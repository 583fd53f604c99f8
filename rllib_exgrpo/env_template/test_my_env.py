"""Tests of MyEnv."""

from my_env import MyEnv

from rllib_exgrpo.envs.conformance import assert_conforms


def test_it_keeps_what_training_relies_on() -> None:
    """Checks ids, prompts, gold answers, hostile completions, splits and more."""
    assert_conforms(MyEnv)


def test_verdicts() -> None:
    """States what is right and what is wrong, as examples."""
    env = MyEnv()
    problem = env.problem("banana/a")
    completions = ["b-a-n-a-n-a. Answer: 3", "Answer: 2", "Three.", "Answer: 3 or 2"]
    rewards = [v.reward for v in env.verify_many(completions, [problem] * 4)]
    assert rewards == [1.0, 0.0, 0.0, 0.0]
