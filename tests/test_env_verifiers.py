"""The adapter for tasksets of the package verifiers, with real tasks and rewards."""

import asyncio
import pickle
import signal
import sys
import threading
import types

import pytest

from rllib_exgrpo.envs.conformance import assert_conforms
from rllib_exgrpo.envs.verifiers import VerifiersEnv


@pytest.fixture(scope="module")
def vf():
    return pytest.importorskip("verifiers.v1")


@pytest.fixture
def toy(vf, monkeypatch):
    """A module `toy_taskset` with a taskset of three sums and broken relatives."""

    class Data(vf.TaskData):
        answer: str

    class Sum(vf.Task[Data]):
        @vf.reward(weight=0.75)
        async def is_right(self, task, trace) -> float:
            await asyncio.sleep(0)
            return float(f"<{task.answer}>" in trace.messages[-1].content)

        @vf.reward(weight=0.25)
        async def is_short(self, trace) -> float:
            return float(len(trace.assistant_messages[-1].content) < 10)

    class Hangs(Sum):
        @vf.reward
        async def is_right(self, trace) -> float:
            await asyncio.sleep(60)
            return 1.0

    class Breaks(Sum):
        @vf.reward
        async def is_right(self, trace) -> float:
            raise KeyError("no gold")

    class NeedsRuntime(Sum):
        @vf.reward
        async def is_right(self, trace, runtime) -> float:
            return 1.0

    class NeedsContainer(Sum):
        NEEDS_CONTAINER = True

    class Sums(vf.Taskset):
        task_class, prompt = Sum, "{k} + {k}?"

        def load(self):
            for k in range(3):
                prompt = self.prompt and self.prompt.format(k=k)
                data = Data(prompt=prompt, system_prompt="Add.", answer=str(2 * k))
                yield self.task_class(data)

    class Endless(Sums):
        INFINITE = True

    def build(base=Sums, **attributes):
        return type("Toy", (base,), attributes)(vf.TasksetConfig())

    module = types.ModuleType("toy_taskset")
    module.__all__ = ["Sums"]
    module.Sums, module.build = Sums, build
    module.endless = lambda: build(Endless)
    module.no_prompt = lambda: build(prompt=None)
    for task in (Hangs, Breaks, NeedsRuntime, NeedsContainer):
        module.__dict__[task.__name__] = lambda task=task: build(task_class=task)
    monkeypatch.setitem(sys.modules, "toy_taskset", module)
    return module


@pytest.fixture
def make(toy):
    made = []

    def make(function="build", **settings):
        env = VerifiersEnv(taskset=f"toy_taskset:{function}", **settings)
        made.append(env)
        return env

    yield make
    for env in made:
        env.close()


def test_tasks_become_problems_and_rewards_are_weighted(make):
    env = make()
    problem = env.problem(env.prompt_ids[2])
    assert problem.messages == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2 + 2?"},
    ]
    completions = ["<4>", "2 and 2 make <4>", "<5>", "it is <5>, I think"]
    rewards = [v.reward for v in env.verify_many(completions, [problem] * 4)]
    assert rewards == [1.0, 0.75, 0.25, 0.0]
    assert make(gold_template="<{answer}>").self_check() == []


def test_rewards_are_mapped_to_the_unit_interval(make):
    env = make(reward_range=(-1.0, 1.0))
    problem = env.problem(env.prompt_ids[0])
    assert env.verify("<0>", problem).reward == 1.0
    assert env.verify("a long and wrong answer", problem).reward == 0.5
    verdict = make(reward_range=(0.0, 0.5)).verify("<0>", problem)
    assert (verdict.reason, "`reward_range`" in verdict.message) == ("error", True)


def test_the_packages_own_loader_opens_a_taskset_by_id(toy):
    env = VerifiersEnv(taskset="toy-taskset", limit=2)
    assert len(env.prompt_ids) == 2


def test_it_works_where_a_loop_is_running_and_in_other_threads(make):
    env = make()
    problem = env.problem(env.prompt_ids[1])
    rewards = []

    async def judge_in_a_loop():
        rewards.append(env.verify("<2>", problem).reward)

    asyncio.run(judge_in_a_loop())
    thread = threading.Thread(target=lambda: asyncio.run(judge_in_a_loop()))
    thread.start()
    thread.join()
    assert rewards == [1.0, 1.0]


def test_reward_functions_that_hang_or_break_give_no_verdict(make):
    env = make("Hangs", scoring_time_limit_s=0.1)
    verdict = env.verify("<0>", env.problem(env.prompt_ids[0]))
    assert (verdict.reason, verdict.is_known) == ("timeout", False)
    env = make("Breaks")
    verdict = env.verify("<0>", env.problem(env.prompt_ids[0]))
    assert verdict.reason == "error" and "no gold" in verdict.message


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("NeedsRuntime", "needs a runtime.*one prompt and one completion"),
        ("NeedsContainer", "needs a container"),
        ("no_prompt", "has no prompt"),
        ("endless", "never ends: set `limit`"),
    ],
)
def test_what_is_more_than_one_turn_is_refused(make, function, words):
    with pytest.raises(ValueError, match=words):
        _ = make(function).prompt_ids
    if function == "endless":
        assert len(make(function, limit=2).prompt_ids) == 2


def test_it_conforms_and_travels(make):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    # The toy module exists in this process alone.
    config = {"taskset": "toy_taskset:build", "gold_template": "<{answer}>"}
    assert_conforms(VerifiersEnv, config, other_process=False)
    env = make()
    env.reset()
    assert len(pickle.loads(pickle.dumps(env)).prompt_ids) == 3
    assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ImportError, match=r"rllib_exgrpo\[verifiers\]"):
        _ = VerifiersEnv(taskset="x").prompt_ids
