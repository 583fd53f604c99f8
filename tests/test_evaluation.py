"""Evaluation: estimates by hand and by brute force, sets, files, comparison."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_exgrpo.envs import (
    ArithmeticEnv,
    CountdownEnv,
    MathEnv,
    MultipleChoiceEnv,
)
from rllib_exgrpo.evaluation.compare import compare
from rllib_exgrpo.evaluation.estimators import (
    bootstrap_means,
    majority_at_k,
    pass_at_k,
    percentile_interval,
    powers_of_two,
)
from rllib_exgrpo.evaluation.examples import (
    choose_examples,
    read_examples,
    write_examples,
)
from rllib_exgrpo.evaluation.metrics import evaluation_metrics, headline
from rllib_exgrpo.evaluation.questions import (
    FOLDER,
    Question,
    by_set,
    latest,
    question_from_group,
    read_questions,
    write_questions,
)
from rllib_exgrpo.evaluation.sets import (
    UNNAMED,
    EvaluationSet,
    check_best_checkpoint_set,
    named_sets,
)
from rllib_exgrpo.records import Completion, Group
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.text_env import answer_keys

# --- estimators


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == 0.25
    # Of the 6 pairs of 4 samples, 3 hold the one correct sample.
    assert pass_at_k(4, 1, 2) == 0.5
    # Of the 10 pairs of 5 samples, 3 hold none of the two correct: 1 - 3/10.
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 3, 2) == 1.0


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([i < c for i in range(n)], k))
    assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(s) for s in subsets]))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0)])
def test_pass_at_k_needs_enough_samples(n, c, k):
    with pytest.raises(ValueError, match="at least k samples"):
        pass_at_k(n, c, k)


def test_majority_by_hand():
    # "3" has two votes of four and is right.
    assert majority_at_k(["3", "4", "3", None], [True, False, True, False], 4) == 1.0
    # Two votes each: half of the tied answers are right.
    assert majority_at_k(["3", "4", "4", "3"], [True, False, False, True], 4) == 0.5
    # Blocks ("3", "4") and ("4", "4"): a tie, then a wrong majority. The fifth is left.
    answers, right = ["3", "4", "4", "4", "3"], [True, False, False, False, True]
    assert majority_at_k(answers, right, 2) == 0.25
    assert majority_at_k([None, None], [False, False], 2) == 0.0


def test_powers_of_two():
    assert powers_of_two(1) == [1]
    assert powers_of_two(12) == [1, 2, 4, 8]
    assert powers_of_two(0) == []


def test_bootstrap_agrees_with_the_normal_approximation():
    values = np.random.default_rng(3).integers(0, 2, (400, 1)).astype(float)
    low, high = percentile_interval(bootstrap_means(values, [""] * 400))
    half = 1.96 * values.std() / 20
    assert (high - low)[0] == pytest.approx(2 * half, rel=0.1)
    assert (high + low)[0] / 2 == pytest.approx(values.mean(), abs=0.01)


def test_strata_are_resampled_by_themselves():
    # Within each source all questions are alike, so that no resample differs.
    values, sources = [[1.0]] * 3 + [[0.0]] * 5, ["easy"] * 3 + ["hard"] * 5
    np.testing.assert_array_equal(bootstrap_means(values, sources), 3 / 8)
    assert np.ptp(bootstrap_means(values, [""] * 8)) > 0


def test_bootstrap_is_seeded():
    values = np.arange(10.0)[:, None]
    once, again = (bootstrap_means(values, [""] * 10, seed=5) for _ in range(2))
    np.testing.assert_array_equal(once, again)


# --- answers


@pytest.mark.parametrize(
    ("env", "same", "other"),
    [
        (ArithmeticEnv, [r"\boxed{12}", r"so \boxed{ +012 }"], r"\boxed{-12}"),
        (MathEnv, [r"\boxed{\dfrac12}", r"\boxed{ \frac{1}{2} }"], r"\boxed{2}"),
        (MultipleChoiceEnv, [r"\boxed{B}", r"\boxed{(\text{b})}"], r"\boxed{C}"),
    ],
)
def test_spellings_of_an_answer_are_one_vote(env, same, other):
    made = env()
    first, second, third = answer_keys(made, [*same, other])
    assert first == second != third
    no_answer = ["no box", r"\boxed{}", r"\boxed{4", r"<think> \boxed{4}"]
    assert answer_keys(made, no_answer) == [None] * 4


def test_deep_and_long_answers_end_in_a_key_or_none():
    deep = r"\boxed{" + r"\frac{" * 3000 + "1" + "}{2}" * 3000 + "}"
    assert answer_keys(MathEnv(), [deep, rf"\boxed{{{'9' * 10_001}}}"]) == [None, None]


def test_an_environment_without_answer_keys_has_no_votes():
    assert answer_keys(CountdownEnv(), [r"\boxed{1 + 2}"]) is None


# --- questions and metrics


def group(prompt_id, rewards, answers=None, source="", reasons=None):
    completions = [
        Completion(np.arange(2 + i, dtype=np.int32), np.zeros(2 + i), reward, 0, i == 1)
        for i, reward in enumerate(rewards)
    ]
    return Group(
        prompt_id,
        np.array([1], np.int32),
        completions,
        source=source,
        reasons=reasons or ["ok" if r == 1 else "wrong" for r in rewards],
        answers=answers,
    )


def question(prompt_id, num_correct, num_samples=4, source="", **changes):
    values = {
        "evaluation_set": UNNAMED,
        "iteration": 0,
        "prompt_id": prompt_id,
        "source": source,
        "num_samples": num_samples,
        "num_correct": num_correct,
        "num_truncated": 1,
        "num_formatted": 3,
        "length_mean": 10.0,
    }
    return Question(**{**values, **changes})


def test_question_of_a_group():
    made = question_from_group(
        group(
            ("a", 1),
            [1.0, 0.0, float("nan"), 1.0],
            answers=["3", "4", None, "3"],
            reasons=["ok", "wrong", "no_answer", "ok"],
        ),
        evaluation_set="amc",
        iteration=7,
        success_threshold=1.0,
    )
    # Lengths 2, 3, 4, 5. Votes of two: ("3", "4") ties, (None, "3") is right.
    assert made == question(
        '{"tuple": ["a", 1]}',
        2,
        evaluation_set="amc",
        iteration=7,
        length_mean=3.5,
        majority=[0.75, 1.0],
    )


def test_metrics_by_hand():
    metrics = evaluation_metrics(
        [question("a", 1, majority=[0.5, 0.0]), question("b", 4, majority=[1.0, 1.0])]
    )
    assert metrics["pass_at_1"] == 0.625
    assert metrics["pass_at_2"] == 0.75  # 1/2 and 1
    assert metrics["pass_at_4"] == 1.0
    assert (metrics["maj_at_2"], metrics["maj_at_4"]) == (0.75, 0.5)
    # Two rates 0.25 and 1: deviation 0.53033, over the root of 2.
    assert metrics["pass_at_1_stderr"] == pytest.approx(0.375)
    # A resample is (a, a), (a, b) or (b, b), the outer ones with a chance of 1/4 each.
    assert (metrics["pass_at_1_low"], metrics["pass_at_1_high"]) == (0.25, 1.0)
    assert (metrics["num_prompts"], metrics["num_completions"]) == (2, 8)
    assert metrics["samples_per_prompt"] == 4
    assert metrics["truncated_fraction"] == 0.25
    assert metrics["format_fraction"] == 0.75
    assert not any("_of_" in name for name in metrics)


def test_majority_is_absent_where_answers_cannot_be_told():
    assert not any("maj" in m for m in evaluation_metrics([question("a", 1)]))


def test_metrics_by_source():
    metrics = evaluation_metrics(
        [question("a", 4, source="amc"), question("b", 1, source="aime")]
    )
    assert metrics["pass_at_1_of_amc"] == 1.0
    assert metrics["pass_at_2_of_aime"] == 0.5
    # Each source has one question, so that no resample differs.
    assert metrics["pass_at_1_low"] == metrics["pass_at_1_high"] == 0.625


def test_the_headline_is_the_unnamed_set_or_else_the_first():
    unnamed = {"pass_at_1": 0.5, "amc": {"pass_at_1": 0.1}}
    assert headline(unnamed) is unnamed
    named = {"num_healthy_workers": 0, "amc": {"pass_at_1": 0.1}}
    assert headline(named) == {"pass_at_1": 0.1}
    assert headline({}) == {}


def test_questions_survive_their_file(tmp_path):
    folder = Folder.at(tmp_path / FOLDER)
    first = [question("a", 1), question("b", 2, majority=[0.5, 1.0])]
    second = [question("a", 3, iteration=8, evaluation_set="amc")]
    write_questions(folder, 8, second)
    write_questions(folder, 0, first)
    assert read_questions(tmp_path) == first + second
    assert latest(first + second) == second
    assert by_set(first + second) == {UNNAMED: first, "amc": second}
    assert [p.suffix for p in (tmp_path / FOLDER).iterdir()] == [".parquet"] * 2
    assert read_questions(tmp_path / FOLDER / "questions-000008.parquet") == second


def test_examples_are_the_worst_and_the_best_with_a_right_and_a_wrong(tmp_path):
    rewards = [[0.0, 0.0]] * 5 + [[0.0, 1.0]] + [[1.0, 1.0]] * 5
    groups = [group(i, r) for i, r in enumerate(rewards)]
    questions = [
        question_from_group(g, evaluation_set="amc", iteration=3, success_threshold=1.0)
        for g in groups
    ]
    examples = choose_examples(questions, groups, lambda ids: f"{len(ids)} tokens")
    assert [e.prompt_id for e in examples] == [*"01237", "8", "9", "10"]
    assert {e.pass_rate for e in examples} == {0.0, 1.0}
    mixed = choose_examples(questions[5:6], groups[5:6], str)
    assert [(e.reward, e.num_tokens) for e in mixed] == [(1.0, 3), (0.0, 2)]
    write_examples(Folder.at(tmp_path / FOLDER), 3, examples)
    assert read_examples(tmp_path) == examples
    assert read_examples(tmp_path / "nothing") == []


# --- sets

DEFAULTS = EvaluationSet(UNNAMED, "Env", {"split": "train", "seed": 1}, samples=4)


def test_a_set_takes_what_it_leaves_out_from_the_defaults():
    sets = named_sets(
        {
            "heldout": {"env_config": {"split": "heldout"}, "samples": 32},
            "amc": {"env": "Other", "env_config": {"data": "a"}, "role": "test"},
        },
        DEFAULTS,
    )
    assert sets["heldout"] == EvaluationSet(
        "heldout", "Env", {"split": "heldout", "seed": 1}, samples=32
    )
    assert sets["amc"] == EvaluationSet(
        "amc", "Other", {"data": "a"}, samples=4, role="test"
    )
    assert sets["amc"].path == "evaluation/amc"
    assert DEFAULTS.path == "evaluation"


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"a": {"sample": 2}}, "'sample'.*'samples'"),
        ({"a": {"samples": 0}}, "`samples` of the evaluation set 'a' is 0"),
        ({"a": {"temperature": -1.0}}, "`temperature`.*-1.0.*greedy"),
        ({"a": {"max_prompts": 0}}, "`max_prompts`"),
        ({"a": {"role": "dev"}}, "'dev': take one of 'validation', 'test'"),
        ({"a/b": {}}, "'a/b'"),
        ({"evaluation": {}}, "neither 'evaluation'"),
        ({"pass_at_1": {}}, "metric's name"),
    ],
)
def test_a_set_that_cannot_be_used_is_refused(described, words):
    with pytest.raises(ValueError, match=words):
        named_sets(described, DEFAULTS)


def test_the_best_checkpoint_is_never_chosen_on_a_test_set():
    sets = named_sets({"dev": {}, "amc": {"role": "test"}}, DEFAULTS)
    check_best_checkpoint_set(None, sets)
    check_best_checkpoint_set("dev", sets)
    with pytest.raises(ValueError, match="'amc', a test set.*'validation'"):
        check_best_checkpoint_set("amc", sets)
    with pytest.raises(ValueError, match="'amcc'; .* are 'dev', 'amc'"):
        check_best_checkpoint_set("amcc", sets)


# --- comparison


def run_of(*num_correct, source=""):
    return [question(str(i), c, source=source) for i, c in enumerate(num_correct)]


def test_pairing_finds_a_difference_that_the_spread_of_questions_hides():
    a, b = run_of(*[1, 4] * 20), run_of(*[0, 3] * 20)
    found = compare([a], [b])
    assert found.num_questions == 40
    assert (found.pass_at_1_a, found.pass_at_1_b) == (0.625, 0.375)
    # Each question differs by 1/4, so that every resample does.
    assert [found.low, found.high] == pytest.approx([0.25, 0.25])
    assert found.verdict == "A is better"
    assert compare([b], [a]).verdict == "B is better"


def test_equal_sides_show_no_difference():
    same = run_of(*[0, 1, 2, 3, 4] * 8)
    found = compare([same], [same])
    assert (found.difference, found.low, found.high) == (0.0, 0.0, 0.0)
    assert found.verdict == "no difference shown"


def test_runs_that_differ_widen_the_interval():
    low, high, middle = run_of(*[1] * 50), run_of(*[3] * 50), run_of(*[2] * 50)
    # Each question is alike: with one run a side nothing varies.
    assert compare([high], [middle]).low == 0.25
    found = compare([low, high], [middle, middle])
    # Two runs drawn of A are both low, mixed, or both high: -1/4, 0, 1/4.
    assert (found.low, found.high) == (-0.25, 0.25)


def test_only_shared_questions_are_compared():
    a, b = run_of(4, 4, 4), run_of(0, 0)
    assert compare([a], [b]).num_questions == 2
    with pytest.raises(ValueError, match="share no question"):
        compare([a], [[question("x", 1)]])
