"""Tasks of reasoning-gym: splits, scorers in processes with limits, errors."""

import sys

import pytest

from rllib_exgrpo.envs import ReasoningGymEnv
from rllib_exgrpo.envs import reasoning_gym as adapter
from rllib_exgrpo.envs.conformance import assert_conforms

pytest.importorskip("reasoning_gym")


@pytest.fixture
def make():
    made = []

    def make(task, **settings):
        defaults = {
            "num_problems": 8,
            "verifier_workers": 1,
            "verifier_time_limit_s": 20.0,  # a loaded machine is slow at first
        }
        made.append(ReasoningGymEnv({"task": task, **defaults, **settings}))
        return made[-1]

    yield make
    for env in made:
        env.close()


def questions(env):
    return {env.problem(i).prompt for i in env.prompt_ids}


def test_splits_share_no_question_whatever_the_seeds(make):
    # Sums of two one-digit numbers: so few that the splits would meet by chance.
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train = make("chain_sum", task_config=config, num_problems=60)
    heldout = make(
        "chain_sum", task_config=config, num_problems=10, split="heldout", seed=7
    )
    assert len(questions(train)) == 60
    assert not questions(train) & questions(heldout)
    assert train.prompt_ids == make("chain_sum", task_config=config,
                                    num_problems=60).prompt_ids  # fmt: skip


def test_the_tasks_own_scorer_judges_what_stands_in_the_tag(make):
    env = make("spell_backward")
    problem = env.problem(env.prompt_ids[0])
    gold = problem.answer["text"]
    completions = [
        f"<answer>{gold}</answer>",
        f"<think><answer>x</answer></think> so <answer> {gold} </answer>",
        gold,
        f"<answer>{gold}",
        f"<answer>{'x' * 20_000}</answer>",
    ]
    verdicts = env.verify_many(completions, [problem] * 5)
    assert [v.reason for v in verdicts] == [
        "ok", "ok", "no_answer", "no_answer", "answer_unparsed",
    ]  # fmt: skip


def test_a_box_serves_as_well(make):
    env = make("spell_backward", answer_tag=None)
    gold = env.gold_completion(env.problem(env.prompt_ids[0]))
    assert gold.startswith(r"\boxed{")
    assert env.verify("no box", env.problem(env.prompt_ids[0])).reason == "no_answer"


def test_a_scorer_that_evaluates_the_answer_is_stopped(make):
    env = make("simple_integration", verifier_time_limit_s=5.0)
    problem = env.problem(env.prompt_ids[0])
    gold = env.gold_completion(problem)
    hostile = "<answer>9**9**9**9**9</answer>"
    first, stopped, last = env.verify_many([gold, hostile, gold], [problem] * 3)
    assert (first.reason, stopped.reason, last.reason) == ("ok", "timeout", "ok")


def test_it_conforms(make):
    config = {"task": "basic_arithmetic", "num_problems": 8, "verifier_workers": 1}
    assert_conforms(ReasoningGymEnv, config, other_process=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"task": None}, "`task` is None"),
        ({"task": "chain_sum", "task_config": {"terms": 2}}, "`task_config`.*terms"),
        ({"task": "chain_sum", "task_config": {"min_terms": 0}}, "`task_config`"),
    ],
)
def test_bad_settings_are_told(settings, words):
    with pytest.raises(ValueError, match=words):
        _ = ReasoningGymEnv(settings).prompt_ids


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"rllib_exgrpo\[reasoning-gym\]"):
        adapter._import_package()
