"""Prompts checked at start and when drawn, and compared between environments."""

import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from rllib_exgrpo import prompt_book
from rllib_exgrpo.envs import Problem, TableEnv, VerifiableTextEnv
from rllib_exgrpo.policy import resolve_model
from rllib_exgrpo.prompt_book import PromptBook, overlapping_questions
from rllib_exgrpo.prompt_format import PromptFormatter

TOKENIZER = AutoTokenizer.from_pretrained(resolve_model("tiny-arithmetic"))


class TextsEnv(VerifiableTextEnv):
    """Asks the texts it is given; ids are positions."""

    settings = {"texts": ()}  # noqa: RUF012

    def load(self):
        return [Problem(i, t, "") for i, t in enumerate(self.config["texts"])]

    def verify(self, completion, problem):
        return 0.0


class RowsEnv(TableEnv):
    def verify(self, completion, problem):
        return 0.0


def open_book(env, limit=8, **policies):
    formatter = PromptFormatter(
        TOKENIZER,
        plain_template="{prompt}",
        max_tokens=limit if policies.get("long_prompts") == "truncate_left" else None,
    )
    return PromptBook(env, formatter, max_prompt_tokens=limit, **policies)


@pytest.fixture
def later(monkeypatch):
    """Only the first two prompts are checked at start."""
    monkeypatch.setattr(prompt_book, "MAX_CHECKED_AT_START", 2)


def test_prompts_beyond_the_first_follow_the_policy_when_drawn(later, caplog):
    env = TextsEnv(texts=["1", "2", "3" * 9, "4", "5" * 9, "6" * 9, "7"])
    book = open_book(env, long_prompts="drop")
    assert "first 2 of 7 prompts were checked" in caplog.text
    assert list(book.ids) == list(range(7))
    assert book.usable_ids() == [0, 1, 3, 6]
    assert book.usable_ids(3) == [0, 1, 3]
    # Warned of at 1, 2, 4, 8, ... prompts left out.
    assert [f"({n} prompts so far)" in caplog.text for n in (1, 2, 3, 4)] == [
        True, True, False, True,
    ]  # fmt: skip
    book = open_book(env, long_prompts="error")
    assert "`long_prompts`='drop' leaves it out" in caplog.text
    with pytest.raises(ValueError, match=r"more than `max_prompt_tokens`=8.*2 \(9\)"):
        book.is_usable(2)
    assert open_book(env, long_prompts="truncate_left").is_usable(2)


def test_rows_found_bad_when_drawn_are_left_out(later, tmp_path, caplog):
    questions = ["1", "2", "3", None, "5"]
    rows = [{"prompt": q, "answer": "1"} for q in questions]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    env = RowsEnv(
        data=tmp_path / "rows.parquet",
        max_rows_in_memory=0,
        check_rows=1,
        on_bad_rows="drop",
        cache_dir=tmp_path,
    )
    assert open_book(env).usable_ids() == [0, 1, 2, 4]
    assert "row 3 of" in caplog.text


def test_special_token_text_by_policy(caplog):
    env = TextsEnv(texts=["1 + 1", "a <eos> b"])
    assert open_book(env, limit=20).ids == [0, 1]
    assert "1 of 2 prompts of TextsEnv hold the text of a special" in caplog.text
    assert "read as ordinary text" in caplog.text
    assert open_book(env, limit=20, special_token_text="drop").ids == [0]
    with pytest.raises(ValueError, match="special token: 1.*'split'.*'drop'.*'keep'"):
        open_book(env, limit=20, special_token_text="error")


def test_overlap_ignores_case_and_white_space(tmp_path):
    training = TextsEnv(texts=["What is 1+1?", "x", "Solve y=2."])
    evaluation = TextsEnv(texts=["new", "what is\t1 + 1?", "y", "SOLVE Y = 2.\n"])
    assert overlapping_questions(training, evaluation) == ([1, 3], 4)
    # A table gives the questions of chat messages in columns.
    rows = [
        {"prompt": [{"role": "system", "content": "x"}], "answer": "1"},
        *(
            {
                "prompt": [
                    {"role": "user", "content": "before"},
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": "so"},
                ],
                "answer": "1",
            }
            for text in ("What is 1+1?", "other")
        ),
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for in_memory in (0, None):
        table = RowsEnv(
            data=tmp_path / "rows.parquet",
            max_rows_in_memory=in_memory,
            on_bad_rows="drop",
            cache_dir=tmp_path,
        )
        assert overlapping_questions(table, evaluation) == ([1], 4)
        assert overlapping_questions(training, table) == ([1], 3)


def test_a_plain_gymnasium_environment_is_compared_by_resetting_it():
    class Plain:
        prompt_ids = ("a", "b")
        unwrapped = property(lambda self: self)

        def reset(self, options):
            return options["prompt_id"].upper(), {}

    assert overlapping_questions(Plain(), TextsEnv(texts=["c", "b"])) == ([1], 2)


def test_no_message_on_the_tokenizers_own_limit(capfd, caplog):
    with caplog.at_level(logging.WARNING):
        open_book(TextsEnv(texts=["1" * 5000]), limit=5000)
    assert "longer than" not in caplog.text + capfd.readouterr().err
