"""The conformance kit: what it finds, and that the shipped environments pass it."""

import itertools
import os
import random
import time

import gymnasium as gym
import pytest

from rllib_exgrpo.envs import (
    ArithmeticEnv,
    CountdownEnv,
    Problem,
    TextSpace,
    VerifiableTextEnv,
)
from rllib_exgrpo.envs.conformance import (
    Finding,
    Level,
    assert_conforms,
    check_env,
)
from rllib_exgrpo.envs.conformance_checks import HOSTILE


class AddEnv(VerifiableTextEnv):
    """Wants a marked number; the broken ones below change one thing each."""

    settings = {"split": "train"}  # noqa: RUF012
    start = 0

    def load(self):
        first = self.start + 100 * (self.config["split"] == "heldout")
        return [self.problem_of(k) for k in range(first, first + 6)]

    def problem_of(self, k):
        return Problem(k, f"{k} + {k}?", str(2 * k))

    def verify(self, completion, problem):
        return float(f"<{problem.answer}>" in completion)

    def gold_completion(self, problem):
        return f"<{problem.answer}>"


class GarbageCounts(AddEnv):
    def verify(self, completion, problem):
        return 0.0 if completion.startswith("<x") else 1.0


class Crashes(AddEnv):
    def verify(self, completion, problem):
        return float(int(completion.strip("<>")) == int(problem.answer))


class WrongGold(AddEnv):
    def gold_completion(self, problem):
        return problem.answer  # without the marks


class AlwaysRight(AddEnv):
    def verify(self, completion, problem):
        return float(completion.startswith("<") and completion.endswith(">"))


class OutOfRange(AddEnv):
    def verify(self, completion, problem):
        return 2.0 * super().verify(completion, problem)


class Overlaps(AddEnv):
    def problem_of(self, k):
        return super().problem_of(k % 100)


class RandomPrompts(AddEnv):
    def problem_of(self, k):
        return Problem(k, f"{random.random()} + {k}?", "1")


class ListIds(AddEnv):
    def problem_of(self, k):
        return Problem(frozenset([k]), f"{k} + {k}?", str(2 * k))


class Narrow(AddEnv):
    def __init__(self, config=None):
        super().__init__(config)
        self.observation_space = gym.spaces.Text(10)


class Echo(AddEnv):
    def problem_of(self, k):
        return Problem(k, f"Say <{2 * k}>.", str(2 * k))


class Slow(AddEnv):
    def verify(self, completion, problem):
        time.sleep(0.11)
        return super().verify(completion, problem)


class DependsOnTheProcess(AddEnv):
    def problem_of(self, k):
        return Problem(k, f"{k} + {k} in {os.getpid()}?", str(2 * k))


class Bare(gym.Env):
    """No environment of ours, but it names its problems."""

    prompt_ids = ("a", "b")

    def __init__(self, config=None):
        self.observation_space = self.action_space = TextSpace()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        index = int(self.np_random.integers(2))
        self.prompt_id = (options or {}).get("prompt_id", self.prompt_ids[index])
        return f"Say {self.prompt_id}.", {"prompt_id": self.prompt_id}

    def step(self, action):
        return "", float(action == self.prompt_id), True, False, {}


def found(create, config=None, **options):
    """The findings that are no "ok", as `check: level`."""
    findings = check_env(create, config, **{"other_process": False, **options})
    return {f.check: f.level for f in findings if f.level != Level.OK}


def test_a_sound_environment_passes_every_check():
    findings = check_env(AddEnv, other_process=False)
    assert [f.check for f in findings if f.level != Level.OK] == []
    assert len(findings) == 8


@pytest.mark.parametrize(
    ("env", "check"),
    [
        (GarbageCounts, "hostile completions"),
        (Crashes, "hostile completions"),
        (WrongGold, "gold answers"),
        (AlwaysRight, "verifier"),
        (OutOfRange, "gold answers"),
        (Overlaps, "held-out overlap"),
        (RandomPrompts, "resets"),
        (ListIds, "prompt ids"),
        (Narrow, "spaces"),
    ],
)
def test_what_is_broken_is_found_and_named(env, check):
    assert found(env)[check] is Level.ERROR
    with pytest.raises(AssertionError, match=f"error +{check}: "):
        assert_conforms(env, other_process=False)


def test_what_deserves_a_look_is_a_warning():
    assert found(Echo) == {"echo": Level.WARNING}
    assert found(Slow) == {"verifier": Level.WARNING}


def test_another_environment_that_names_its_problems_is_checked_too():
    assert found(Bare) == {"gold answers": Level.WARNING}
    (finding,) = check_env(lambda config: gym.make("CartPole-v1"))
    assert (finding.check, finding.level) == ("loading", Level.ERROR)
    assert "VerifiableTextEnv" in finding.message


@pytest.mark.slow  # imports everything in another process
def test_another_process_must_see_the_same_problems():
    assert found(DependsOnTheProcess, other_process=True) == {
        "other process": Level.ERROR
    }
    unpicklable = {"split": (c for c in "train")}
    assert found(AddEnv, unpicklable, other_process=True)["other process"] == "error"


def test_shipped_environments_conform():
    for env in (ArithmeticEnv, CountdownEnv):
        assert_conforms(env, {"num_problems": 40}, other_process=False)


def test_the_hostile_completions_hold_what_they_promise():
    assert {"", "\x00"} < set(HOSTILE.values())
    assert max(map(len, HOSTILE.values())) >= 1_000_000


def test_findings_read_as_lines():
    assert str(Finding("echo", Level.OK, "fine")) == "ok       echo: fine"
    assert [*itertools.islice(Level, 3)] == ["ok", "warning", "error"]
