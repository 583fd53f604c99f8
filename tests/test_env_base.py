"""The contract of every text environment."""

import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from rllib_exgrpo.envs import (
    ArithmeticEnv,
    Problem,
    Reason,
    TextSpace,
    UnknownPromptError,
    Verdict,
    VerifiableTextEnv,
)


class EchoEnv(VerifiableTextEnv):
    """Wants its prompt back; `broken` makes the verifier raise."""

    settings = {"ids": (0, 1, 2), "broken": False}  # noqa: RUF012

    def load(self):
        return [Problem(i, f"say {i}", str(i), "echo") for i in self.config["ids"]]

    def verify(self, completion, problem):
        if self.config["broken"]:
            raise ZeroDivisionError("no such luck")
        return float(completion == problem.answer)

    def gold_completion(self, problem):
        return problem.answer


def check_quietly(env):
    """Runs Gymnasium's checker; any warning but the one on `spec` is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The env under test is built by its class, so it has no gym id.
        warnings.filterwarnings("ignore", message=".*not having a spec.*")
        check_env(env)


@pytest.mark.parametrize("env", [EchoEnv(), ArithmeticEnv(num_problems=8)])
def test_gymnasium_accepts_it(env):
    check_quietly(env)


@given(st.text())
def test_text_space_holds_any_text(text):
    assert TextSpace().contains(text)


def test_text_space_refuses_other_types_and_round_trips():
    space = TextSpace(seed=3)
    assert not any(map(space.contains, (b"a", 1, None, ["a"])))
    twin = pickle.loads(pickle.dumps(space))
    assert twin == space
    assert [twin.sample() for _ in range(4)] == [space.sample() for _ in range(4)]


def test_reset_takes_the_named_problem_and_step_judges_it():
    env = EchoEnv(render_mode="ansi")
    text, info = env.reset(options={"prompt_id": 2})
    assert (text, info["prompt_id"], info["source"]) == ("say 2", 2, "echo")
    assert info["messages"] == [{"role": "user", "content": "say 2"}]
    observation, reward, terminated, truncated, info = env.step("2")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info["reason"] == "ok"
    assert env.render() == "say 2\n2\nReward: 1 (ok)"


def test_reset_without_a_name_draws_by_the_seed():
    drawn = [EchoEnv().reset(seed=seed)[1]["prompt_id"] for seed in range(20)]
    assert set(drawn) == {0, 1, 2}
    assert drawn == [EchoEnv().reset(seed=seed)[1]["prompt_id"] for seed in range(20)]


def test_stepping_twice_needs_a_reset():
    env = EchoEnv()
    with pytest.raises(ResetNeeded, match="one step an episode"):
        env.step("1")
    env.reset()
    env.step("1")
    with pytest.raises(ResetNeeded):
        env.step("1")


def test_chat_prompt_shows_the_last_user_message():
    messages = tuple(
        {"role": role, "content": content}
        for role, content in [("system", "s"), ("user", "a"), ("user", "b")]
    )
    problem = Problem("id", messages, "1")
    assert problem.text == "b"
    assert problem.messages == list(messages)


def test_unknown_prompt_id_names_it():
    with pytest.raises(UnknownPromptError, match="prompt_id 'nine'"):
        EchoEnv().reset(options={"prompt_id": "nine"})


def test_unknown_settings_and_options_get_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean `broken`"):
        EchoEnv({"brokn": True})
    with pytest.raises(ValueError, match="did you mean `unscored_reward`"):
        EchoEnv(unscored_rewards=None)
    with pytest.raises(ValueError, match="did you mean `prompt_id`"):
        EchoEnv().reset(options={"promt_id": 1})


def test_config_dict_and_keywords_are_merged():
    assert EchoEnv({"ids": (7,)}, broken=True).config == {
        "unscored_reward": 0.0,
        "ids": (7,),
        "broken": True,
    }


def test_duplicate_ids_are_listed_and_no_problem_is_an_error():
    with pytest.raises(ValueError, match=r"once: \[5, 6\]"):
        _ = EchoEnv(ids=(5, 5, 6, 6, 7)).prompt_ids
    with pytest.raises(ValueError, match="no problem"):
        _ = EchoEnv(ids=()).prompt_ids


def test_loading_waits_until_a_problem_is_needed():
    class Late(EchoEnv):
        def load(self):
            raise OSError("loaded")

    env = Late()
    assert env.observation_space == TextSpace()
    with pytest.raises(OSError, match="loaded"):
        _ = env.prompt_ids


def test_broken_verifier_surfaces_and_never_counts_as_correct():
    env = EchoEnv(broken=True)
    env.reset()
    with pytest.raises(ZeroDivisionError):
        env.step("1")
    (verdict,) = env.verify_many(["1"], [env.problem(1)])
    assert verdict.reason == Reason.ERROR and not verdict.is_known
    assert "no such luck" in verdict.message
    assert "prompt 1, test_env_base.py, line " in verdict.message
    assert env.reward(verdict) == 0.0
    assert len(env.self_check()) == 3


@pytest.mark.parametrize("reward", [1.5, -0.1])
def test_reward_out_of_range_is_refused(reward):
    class Odd(EchoEnv):
        def verify(self, completion, problem):
            return reward

    env = Odd()
    env.reset()
    with pytest.raises(ValueError, match=r"rewards lie in \[0, 1\]"):
        env.step("1")


def test_reward_without_a_verdict_is_configurable():
    unknown = Verdict.of(Reason.TIMEOUT)
    assert EchoEnv().reward(unknown) == 0.0
    reward = EchoEnv(unscored_reward=None).reward(unknown)
    assert reward != reward  # NaN
    assert EchoEnv(unscored_reward=None).reward(Verdict(0.25, "wrong")) == 0.25


def test_verify_many_keeps_order_and_refuses_unequal_lengths():
    env = EchoEnv()
    problems = [env.problem(i) for i in (2, 0, 1)]
    verdicts = env.verify_many(["2", "x", "1"], problems)
    assert [v.reward for v in verdicts] == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError):
        env.verify_many(["2"], problems)


def test_pickle_round_trip_after_use():
    env = EchoEnv()
    env.reset(options={"prompt_id": 1})
    assert pickle.loads(pickle.dumps(env)).step("1")[1] == 1.0


def test_gymnasium_make_passes_settings_as_keywords():
    gym.register("test/Arithmetic-v0", entry_point=ArithmeticEnv)
    env = gym.make("test/Arithmetic-v0", num_problems=3, split="heldout")
    assert len(env.unwrapped.prompt_ids) == 3
    assert env.reset(seed=0)[1]["source"] == "arithmetic"


def test_the_environments_are_light_to_import():
    """Loads every module under a name of its own, as the parent package has Ray."""
    script = f"""
import importlib, pathlib, sys, types
folder = pathlib.Path({str(Path(__file__).parent.parent / "envs")!r})
package = sys.modules["light"] = types.ModuleType("light")
package.__path__ = [str(folder)]
for file in folder.glob("*.py"):
    importlib.import_module("light." + file.stem)
heavy = "ray torch vllm transformers sympy math_verify pyarrow".split()
print([name for name in heavy if name in sys.modules])
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
