"""The arithmetic environment: its splits, problems and exact verifier."""

import pytest

from rllib_exgrpo.envs import ArithmeticEnv


def pairs(env):
    """The unordered number pairs of an environment."""
    return {tuple(sorted(map(int, i.split("+")))) for i in env.prompt_ids}


def test_default_sizes_and_no_overlap_whatever_the_seeds():
    train = ArithmeticEnv()
    heldout = ArithmeticEnv(split="heldout", seed=17, digits=(1, 2))
    assert (len(pairs(train)), len(pairs(heldout))) == (2048, 256)
    assert not pairs(train) & pairs(heldout)


def test_problems_are_seeded():
    first, again, other = (ArithmeticEnv(seed=s).prompt_ids for s in (1, 1, 2))
    assert first == again != other


def test_prompt_answer_and_id():
    env = ArithmeticEnv()
    prompt_id = env.prompt_ids[0]
    a, b = map(int, prompt_id.split("+"))
    problem = env.problem(prompt_id)
    assert problem.prompt == f"What is {a} + {b}?"
    assert problem.answer == str(a + b)


def test_number_of_digits_mixes():
    ids = ArithmeticEnv(digits=(1, 3)).prompt_ids
    lengths = {tuple(map(len, prompt_id.split("+"))) for prompt_id in ids}
    assert lengths == {(i, j) for i in (1, 2, 3) for j in (1, 2, 3)}


def test_every_gold_scores_one():
    assert ArithmeticEnv().self_check() == []


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        (r"It is \boxed{1234}.", "ok"),
        (r"\boxed{ 01234 }", "ok"),
        (r"\boxed{+1,234}", "ok"),
        (r"\boxed{1} no, \boxed{1234}", "ok"),
        (r"\boxed{1234} no, \boxed{1}", "wrong"),
        (r"\boxed{-1234}", "wrong"),
        (r"\boxed{" + "9" * 6000 + "}", "wrong"),
        (r"\boxed{1234} or \boxed{1234", "no_answer"),
        ("1234", "no_answer"),
        (r"<think>\boxed{1234}", "no_answer"),
        (r"<think>\boxed{1}</think> \boxed{1234}", "ok"),
        (r"\boxed{1,2,34}", "answer_unparsed"),
        (r"\boxed{1200+34}", "answer_unparsed"),
        (r"\boxed{}", "answer_unparsed"),
    ],
)
def test_verdicts(completion, reason):
    class Fixed(ArithmeticEnv):
        def load(self):
            (problem, *_) = super().load()
            return [type(problem)("x", "What is 1000 + 234?", "1234")]

    env = Fixed(num_problems=1)
    assert env.verify(completion, env.problem("x")).reason == reason


def test_minus_zero_is_zero():
    env = ArithmeticEnv(digits=(1, 1), num_problems=40)
    zero = type(env.problem(env.prompt_ids[0]))("0+0", "", "0")
    assert env.verify(r"\boxed{-0}", zero).reward == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "test"}, "`split` is 'test'"),
        ({"digits": (3, 1)}, "`digits` is"),
        ({"digits": (0, 1)}, "`digits` is"),
        ({"num_problems": 0}, "`num_problems` is 0"),
        ({"digits": (1, 1)}, "distinct problems"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        _ = ArithmeticEnv(settings).prompt_ids
