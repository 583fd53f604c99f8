"""Completions are judged early where the environment can, with the same outcome."""

from concurrent.futures import Future
from types import SimpleNamespace

import gymnasium as gym
import pytest

from rllib_exgrpo.envs import PooledEnv, Problem, Reason, Verdict, VerifiableTextEnv
from rllib_exgrpo.judging import Judging
from rllib_exgrpo.records import RolloutRequest

PROBLEMS = [Problem(0, "1+1?", "2"), Problem(1, "2+2?", "4")]
TEXTS_PG = [["2", "3"], ["4"]]


class LateEnv(VerifiableTextEnv):
    """Judges all completions in one call."""

    def load(self):
        return PROBLEMS

    def verify(self, completion, problem):
        return float(completion == problem.answer)

    def verify_many(self, completions, problems):
        self.calls = [*getattr(self, "calls", []), list(completions)]
        return super().verify_many(completions, problems)


class EarlyEnv(PooledEnv):
    """Judges in a pool, for which a list of open answers stands in."""

    def load(self):
        return PROBLEMS

    def build_pool(self, **limits):
        return SimpleNamespace(open=[], close=lambda: None)

    def submit(self, completion, problem):
        future = Future()
        self.pool.open.append((future, completion, problem))
        return future

    def judge_open(self):
        for future, completion, problem in self.pool.open:
            reason = Reason.OK if completion == problem.answer else Reason.WRONG
            future.set_result(Verdict.of(reason))


def judging_of(env, evaluation_set=None):
    request = RolloutRequest(
        [0, 1], [2, 1], temperature=1.0, seed=0, evaluation_set=evaluation_set
    )
    return Judging(env, request, decode=list)


def test_an_environment_without_a_pool_is_asked_once_in_the_end():
    env = LateEnv()
    judging = judging_of(env)
    assert judging.on_finished is None
    judged_PG, answers_PG = judging.finish(TEXTS_PG)
    assert [[j.reward for j in judged_G] for judged_G in judged_PG] == [[1, 0], [1]]
    assert env.calls == [["2", "3", "4"]]
    assert answers_PG == [None, None]


def test_a_pool_gets_completions_as_prompts_are_finished():
    env = EarlyEnv()
    judging = judging_of(env)
    judging.on_finished(1, TEXTS_PG[1])  # the second prompt is done first
    assert [completion for _, completion, _ in env.pool.open] == ["4"]
    judging.on_finished(0, TEXTS_PG[0])
    env.judge_open()
    judged_PG, _ = judging.finish(TEXTS_PG)
    assert [[j.reward for j in judged_G] for judged_G in judged_PG] == [[1, 0], [1]]


@pytest.mark.parametrize("env_class", [LateEnv, EarlyEnv])
def test_an_evaluation_gets_the_answers_of_each_prompt(env_class):
    env = env_class()
    env.answer_key = str.upper
    judging = judging_of(env, evaluation_set=SimpleNamespace(name="heldout"))
    texts_PG = [["a", "b"], ["c"]]
    if judging.on_finished is not None:
        for position in (1, 0):
            judging.on_finished(position, texts_PG[position])
        env.judge_open()
    assert judging.finish(texts_PG)[1] == [["A", "B"], ["C"]]


def test_a_wrapped_environment_is_stepped():
    # A wrapper may change rewards, so that nothing may go past it.
    env = gym.wrappers.TransformReward(EarlyEnv(), lambda reward: 0.5 * reward)
    env.unwrapped.verify = lambda completion, problem: completion == problem.answer
    judging = judging_of(env)
    assert judging.on_finished is None
    judged_PG, _ = judging.finish(TEXTS_PG)
    assert [[j.reward for j in judged_G] for judged_G in judged_PG] == [[0.5, 0], [0.5]]
