"""Multiple choice, countdown and GSM8K-form environments."""

import json
import re
from fractions import Fraction
from operator import add, mul, sub, truediv

import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from rllib_exgrpo.envs import (
    CountdownEnv,
    GSM8KEnv,
    MultipleChoiceEnv,
    Problem,
)

# The environments under test are built by their classes, so they have no gym id.
pytestmark = pytest.mark.filterwarnings("ignore:.*not having a spec")
QUESTION = "Which city is the capital of France?"
CITIES = ["London", "Paris", "Rome"]


@pytest.fixture
def write(tmp_path):
    def write(rows):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def only_problem(env):
    (prompt_id,) = env.prompt_ids
    return env.problem(prompt_id)


@pytest.mark.parametrize(
    ("choices", "answer"),
    [
        (CITIES, "B"),
        (CITIES, 1),
        (CITIES, "Paris"),
        ({"text": CITIES, "label": ["1", "2", "3"]}, "2"),
    ],
)
def test_multiple_choice_reads_every_form(write, choices, answer):
    rows = [{"question": QUESTION, "choices": choices, "answer": answer}]
    env = MultipleChoiceEnv(data=write(rows))
    check_env(env)
    problem = only_problem(env)
    assert problem.answer["letter"] == "B"
    assert f"{QUESTION}\n(A) London\n(B) Paris\n(C) Rome\n" in problem.text
    assert env.self_check() == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("B", "ok"),
        ("b", "ok"),
        ("(B)", "ok"),
        (r"\text{B}", "ok"),
        (r"\textbf{(B)}\ Paris", "ok"),
        ("B. Paris", "ok"),
        ("paris", "ok"),
        (r"\text{Option B}", "ok"),
        ("A", "wrong"),
        ("Rome", "wrong"),
        ("Z", "wrong"),
        ("A, B", "wrong"),
        ("Berlin", "answer_unparsed"),
        ("", "no_answer"),
    ],
)
def test_multiple_choice_verdicts(answer, reason):
    problem = Problem(0, QUESTION, {"letter": "B", "choices": CITIES})
    verdict = MultipleChoiceEnv().verify(rf"\boxed{{{answer}}}", problem)
    assert verdict.reason == reason


def test_multiple_choice_shuffles_the_same_way_each_time(write):
    rows = [
        {"question": f"{k}?", "choices": list("wxyz"), "answer": "w"} for k in range(40)
    ]
    path = write(rows)
    first, again = (MultipleChoiceEnv(data=path, shuffle_seed=1) for _ in range(2))
    letters = [first.problem(i).answer["letter"] for i in first.prompt_ids]
    assert set(letters) == set("ABCD")
    assert letters == [again.problem(i).answer["letter"] for i in again.prompt_ids]
    for prompt_id, letter in zip(first.prompt_ids, letters, strict=True):
        assert f"({letter}) w" in first.problem(prompt_id).text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "D"}, "the answer is none of the choices"),
        ({"choices": ["Paris"], "answer": "A"}, "not 2 to 26 choices"),
        ({"question": ""}, "no question"),
    ],
)
def test_multiple_choice_refuses_bad_rows(write, change, message):
    row = {"question": QUESTION, "choices": CITIES, "answer": "B"} | change
    with pytest.raises(ValueError, match=message):
        _ = MultipleChoiceEnv(data=write([row])).prompt_ids


def test_countdown_problems_have_solutions_and_splits_do_not_overlap():
    train = CountdownEnv(num_problems=200)
    heldout = CountdownEnv(num_problems=50, split="heldout", seed=5)
    check_env(train)
    assert train.self_check() == heldout.self_check() == []

    def keys(env):
        problems = map(env.problem, env.prompt_ids)
        return {
            (*sorted(p.answer["numbers"]), p.answer["target"], p.source)
            for p in problems
        }

    assert not keys(train) & keys(heldout)
    prompt_id = train.prompt_ids[0]
    numbers, target = prompt_id.split(" -> ")
    text = train.problem(prompt_id).text
    assert f"[{numbers.replace(' ', ', ')}]" in text
    assert f"equals {target}." in text


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("(25 - 5) * 3", "ok"),
        ("3 * (25 - 5) = 60", "ok"),
        (r"3 \times (25-5)", "ok"),
        (r"\frac{25-5}{\frac{1}{3}}", "wrong"),  # 1 was not given
        ("3 * (25 - 5) = 61", "wrong"),
        ("60", "wrong"),
        ("25 + 5 + 3", "wrong"),
        ("(25 - 5) * 3 + 5 - 5", "wrong"),
        ("25 - 5", "wrong"),
        ("25^2 - 565", "answer_unparsed"),
        ("(25 - 5) * 3!", "answer_unparsed"),
        ("(25 - 5 * 3", "answer_unparsed"),
        ("25 / (5 - 5) * 3", "answer_unparsed"),
        ("__import__('os')", "answer_unparsed"),
        ("x", "answer_unparsed"),
    ],
)
def test_countdown_verdicts(answer, reason):
    problem = Problem(0, "", {"numbers": [3, 5, 25], "target": 60, "solution": ""})
    verdict = CountdownEnv().verify(rf"\boxed{{{answer}}}", problem)
    assert verdict.reason == reason


def join(operator, left, right):
    """A bracketed expression with its exact value; None after a division by zero."""
    (text, value), (other_text, other) = left, right
    try:
        value = OPERATORS[operator](value, other)
    except (ZeroDivisionError, TypeError):
        value = None
    return f"({text} {operator} {other_text})", value


OPERATORS = {"+": add, "-": sub, "*": mul, "/": truediv}
NUMBERS = st.integers(0, 99).map(lambda n: (str(n), Fraction(n)))
EXPRESSIONS = st.recursive(
    NUMBERS, lambda e: st.builds(join, st.sampled_from("+-*/"), e, e), max_leaves=6
)


@given(EXPRESSIONS)
def test_countdown_arithmetic_is_exact(expression):
    text, value = expression
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    problem = Problem(0, "", {"numbers": numbers, "target": value, "solution": ""})
    verdict = CountdownEnv().verify(rf"\boxed{{{text}}}", problem)
    assert verdict.reason == ("answer_unparsed" if value is None else "ok")


@given(st.text(alphabet="0123456789+-*/() ^!=.", max_size=40))
def test_countdown_judges_anything_without_crashing(text):
    problem = Problem(0, "", {"numbers": [1], "target": 10**50, "solution": ""})
    assert CountdownEnv().verify(rf"\boxed{{{text}}}", problem).reward == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_numbers": (1, 3)}, "`num_numbers` is"),
        ({"max_target": 0}, "`max_target` is 0"),
    ],
)
def test_countdown_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        _ = CountdownEnv(settings).prompt_ids


def test_gsm8k_form(write):
    worked = "She pays 9*2=<<9*2=18>>18 dollars.\n#### 1,018"
    env = GSM8KEnv(data=write([{"question": "How much?", "answer": worked}]))
    check_env(env)
    problem = only_problem(env)
    assert problem.text.startswith("How much?\nReason step by step")
    rewards = [
        env.verify(rf"\boxed{{{answer}}}", problem).reward
        for answer in ("1018", r"\$1{,}018", "1018.00", "18", "9")
    ]
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert env.self_check() == []
    env.close()


def test_other_file_types_are_refused(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("question,answer\n")
    with pytest.raises(ValueError, match=r"no \.parquet, .*\.json or \.csv"):
        _ = GSM8KEnv(data=path).prompt_ids


def test_csv_is_read(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("question,answer\nHow many?,5\n")
    assert only_problem(GSM8KEnv(data=path)).answer == 5
