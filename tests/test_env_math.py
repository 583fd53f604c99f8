"""The maths environment: what it reads, what it refuses, how it judges."""

import logging
import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium.utils.env_checker import check_env

from rllib_exgrpo.envs import MathEnv

# The environments under test are built by their class, so they have no gym id.
pytestmark = pytest.mark.filterwarnings("ignore:.*not having a spec")


def row(question, gold, source="toy", split="train"):
    return {
        "prompt": [
            {"role": "system", "content": "Use a box."},
            {"role": "user", "content": question},
        ],
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "data_source": source,
        "extra_info": {"split": split},
    }


@pytest.fixture
def write(tmp_path):
    def write(rows, name="data.parquet"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def make():
    """Makes environments and ends their processes after the test."""
    made = []

    def make(path, **settings):
        made.append(MathEnv(data=path, verifier_workers=1, **settings))
        return made[-1]

    yield make
    for env in made:
        env.close()


def test_reads_the_verl_form(write, make):
    env = make(str(write([row("1+1?", "2"), row("sin?", r"\sin x", "other")])))
    check_env(env)
    first, second = map(env.problem, env.prompt_ids)
    assert (first.text, first.answer, first.source) == ("1+1?", "2", "toy")
    assert first.messages[0] == {"role": "system", "content": "Use a box."}
    completions = [r"\boxed{2}", r"\boxed{3}", r"\boxed{x}", r"\boxed{\cos(x-\pi/2)}"]
    problems = [first, first, second, second]
    rewards = [v.reward for v in env.verify_many(completions, problems)]
    assert rewards == [1.0, 0.0, 0.0, 1.0]
    env.reset(options={"prompt_id": second.prompt_id})
    assert env.step(r"\boxed{-\sin(-x)}")[1] == 1.0
    assert env.self_check() == []


def test_ids_survive_reordering_and_equal_rows_are_one_problem(write, make, caplog):
    rows = [row("a", "1"), row("b", "2"), row("a", "1")]
    with caplog.at_level(logging.INFO):
        ids = make(write(rows)).prompt_ids
    assert len(ids) == 2
    assert "rows that repeat a problem: 1 (rows 2)" in caplog.text
    assert "2 problems from 3 rows" in caplog.text
    assert set(make(write(rows[::-1])).prompt_ids) == set(ids)


def test_text_prompts_numeric_golds_and_named_columns(write, make):
    path = write([{"q": "half?", "a": 0.5}, {"q": "two?", "a": 2.0}])
    env = make(path, prompt_column="q", answer_column="a", source_column=None)
    half = env.problem(env.prompt_ids[0])
    assert half.prompt == "half?"
    assert env.verify(r"\boxed{\frac12}", half).reward == 1.0


def test_split_limit_and_several_files(write, make):
    one = write([row("a", "1"), row("b", "2", split="test")], "one.parquet")
    two = write([row("c", "3"), row("d", "4")], "two.parquet")
    assert len(make([one, two]).prompt_ids) == 4
    assert len(make([one, two], split="train").prompt_ids) == 3
    assert len(make([one, two], limit=2).prompt_ids) == 2


def test_missing_columns_name_file_columns_and_setting(write, make):
    path = write([{"question": "a", "solution": "1"}])
    with pytest.raises(ValueError) as caught:
        _ = make(path).prompt_ids
    message = str(caught.value)
    for part in (str(path), "'prompt'", "prompt_column", "question", "solution"):
        assert part in message
    assert "'reward_model.ground_truth' (setting `answer_column`)" in message


def test_wrong_column_types_are_refused(write, make):
    path = write([{"prompt": 3, "a": "1"}])
    with pytest.raises(ValueError, match="holds int64"):
        _ = make(path, answer_column="a", source_column=None).prompt_ids


@pytest.mark.parametrize("gold", ["", None, "   ", "no closed form"])
def test_unusable_gold_names_the_row_or_is_dropped(write, make, caplog, gold):
    path = write([row("a", "1"), row("b", gold)])
    with pytest.raises(ValueError, match=r"gold answer: 1 \(rows 1\)"):
        _ = make(path).prompt_ids
    with caplog.at_level(logging.WARNING):
        assert len(make(path, on_bad_rows="drop").prompt_ids) == 1
    assert caplog.text.count("rows left out (row numbers count from 0)") == 1


def test_one_question_with_two_answers_is_refused(write, make):
    path = write([row("a", "1"), row("a", "2")])
    with pytest.raises(ValueError, match="another answer to a question asked before"):
        _ = make(path).prompt_ids


def test_empty_question_is_refused(write, make):
    with pytest.raises(ValueError, match=r"no question: 1 \(rows 0\)"):
        _ = make(write([row("  ", "1")])).prompt_ids


def test_missing_file_and_missing_setting(make, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`data` names .*nope"):
        _ = make(tmp_path / "nope.parquet").prompt_ids
    with pytest.raises(ValueError, match="needs the setting `data`"):
        _ = MathEnv().prompt_ids


def test_timeout_is_unknown_never_correct(write, make):
    env = make(write([row("a", "x+1")]), verifier_time_limit_s=0.3)
    problem = env.problem(env.prompt_ids[0])
    (verdict,) = env.verify_many([r"\boxed{x+9^{9^{9^{\sqrt{81}}}}}"], [problem])
    assert verdict.reason == "timeout" and not verdict.reward >= 1.0
    assert env.reward(verdict) == 0.0


def test_pickles_after_use(write, make):
    env = make(write([row("a", r"\pi")]))
    problem = env.problem(env.prompt_ids[0])
    assert env.verify(r"\boxed{\frac{2\pi}{2}}", problem).reward == 1.0
    twin = pickle.loads(pickle.dumps(env))
    assert twin.verify(r"\boxed{\frac{3\pi}{3}}", problem).reward == 1.0
    twin.close()


def test_every_gold_of_the_competition_file_scores_one(make):
    root = Path(__file__).parent.parent
    shared = Path(os.environ.get("EXGRPO_SHARED", root.parent / "shared"))
    path = shared / "data" / "competition_math_verl.parquet"
    if not path.is_file():
        pytest.skip(f"{path} is not there; set EXGRPO_SHARED to its folder")
    env = make(path)
    assert len(env.prompt_ids) == 1590  # of 2259 rows; AIME and AMC repeat theirs
    assert env.self_check() == []
