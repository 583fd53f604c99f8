"""Problems that others had with data and tokenisation, by the number of their report.

The reports are collected in research/bug_reports.md of the project's shared inputs.
"""

import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.batching import rows_from_groups
from rllib_exgrpo.envs import Problem, TableEnv, VerifiableTextEnv
from rllib_exgrpo.exgrpo_env_runner import ExGRPOEnvRunner
from rllib_exgrpo.exgrpo_evaluation import open_prompts
from rllib_exgrpo.exgrpo_replay import ExGRPOReplayBuffer
from rllib_exgrpo.exgrpo_rollout import RolloutDispatcher
from rllib_exgrpo.policy import resolve_model
from rllib_exgrpo.prompt_format import PromptFormatter
from rllib_exgrpo.prompts import PromptCycle
from rllib_exgrpo.records import Group, RolloutRequest, groups_of
from rllib_exgrpo.sampler import Sample


class RowsEnv(TableEnv):
    def verify(self, completion, problem):
        return float(completion == problem.answer)


class DoublesEnv(VerifiableTextEnv):
    """Asks to double a number, in an order that is no one's counting."""

    def load(self):
        return [Problem(k, f"{k} x 2 =", str(2 * k)) for k in reversed(range(32))]

    def verify(self, completion, problem):
        return float(completion == problem.answer)


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def config_for(env, **env_config):
    return (
        ExGRPOConfig()
        .environment(env, env_config=env_config)
        .language_model(max_prompt_tokens=32, max_completion_tokens=64)
        .training(group_size=4)
    )


def tiny_tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model("tiny-arithmetic"))


def runner_with(config, sampler, tokenizer=None, worker_index=0):
    """An env runner with another engine than vLLM."""

    class StubbedRunner(ExGRPOEnvRunner):
        pass

    StubbedRunner.sampler = sampler
    env = config.env
    runner = StubbedRunner(
        config=config, env_creator=env, worker_index=worker_index, num_workers=3
    )
    runner.tokenizer = tokenizer or tiny_tokenizer()
    return runner


def test_report_23_missing_column_is_named_before_a_model_is_loaded(tmp_path):
    # bug report 23
    path = write(tmp_path / "data.parquet", [{"question": "a", "solution": "1"}])
    config = config_for(RowsEnv, data=path)
    config.language_model("no/such-model")  # never looked for
    with pytest.raises(ValueError) as caught:
        open_prompts(config)
    for part in (path, "'prompt' (setting `prompt_column`)", "question", "solution"):
        assert part in str(caught.value)
    config.evaluation(evaluation_config={"env_config": {"limit": 1}})
    (evaluation_set,) = config.build_evaluation_sets().values()
    with pytest.raises(ValueError, match="In `evaluation_config`: .*'prompt'"):
        open_prompts(config, evaluation_set)


LENGTHS = (10, 32, 33, 5000)


@pytest.fixture
def of_lengths(tmp_path):
    """A config whose prompts have so many tokens: of the tiny model, characters."""
    rows = [{"prompt": "7" * n, "answer": "1"} for n in LENGTHS]
    path = write(tmp_path / "data.parquet", rows)
    return config_for(RowsEnv, data=path).language_model(plain_template="{prompt}")


def test_report_24_long_prompts_are_refused_at_load(of_lengths):
    # bug report 24
    with pytest.raises(ValueError, match=r"2 of 4 prompts.*\(33\).*\(5000\)"):
        open_prompts(of_lengths)


def test_report_24_long_prompts_are_dropped_with_one_warning(of_lengths, caplog):
    # bug report 24
    book = open_prompts(of_lengths.language_model(long_prompts="drop"))
    assert [len(book.token_ids(i)) for i in book.ids] == [10, 32]
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
    for length in (33, 5000):
        assert f"({length})" in caplog.text


def test_report_24_engine_and_trainer_see_the_same_cut_ids(of_lengths):
    # bug report 24
    config = of_lengths.language_model(long_prompts="truncate_left")
    book = open_prompts(config)
    seen = []

    class Recording:
        def sample(self, prompts, counts, **kwargs):
            seen.extend(prompts)
            ids, logp = np.array([1], np.int32), np.zeros(1, np.float32)
            return [[Sample(ids, logp, False)] * n for n in counts]

        def close(self):
            pass

    runner = runner_with(config, Recording())
    request = RolloutRequest(list(book.ids), [1] * 4, temperature=1.0, seed=0)
    groups = runner.rollout(request).groups
    assert [len(ids) for ids in seen] == [10, 32, 32, 32]
    for prompt_id, sent, group in zip(book.ids, seen, groups, strict=True):
        np.testing.assert_array_equal(sent, book.token_ids(prompt_id))
        np.testing.assert_array_equal(sent, group.prompt_token_ids)


def test_report_25_base_model_without_chat_template():
    # bug report 25
    config = ExGRPOConfig().environment(DoublesEnv).language_model(prompt_format="chat")
    config.language_model(max_completion_tokens=64)
    with pytest.raises(ValueError, match=r"tokenizer of .* has no chat.*'plain'"):
        open_prompts(config)
    assert len(open_prompts(config.language_model(prompt_format="plain")).ids) == 32


def drifting_tokenizer():
    """Its text " international" is one token, or the two that it is made of."""
    words = [" inter", "national", " international", "<eos>", "<unk>"]
    model = models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("|", "removed")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>"
    )


def test_report_26_ids_are_kept_as_sampled(tmp_path):
    # bug report 26
    class OneWord(VerifiableTextEnv):
        def load(self):
            return [Problem("p", " inter", "")]

        def verify(self, completion, problem):
            return float("national" in completion)

    sampled = np.array([0, 1, 3], np.int32)  # " inter", "national", end
    logp = np.array([-0.5, -0.25, -0.125], np.float32)

    class Engine:
        def sample(self, prompts, counts, **kwargs):
            wrong = Sample(np.array([0, 3], np.int32), logp[:2], False)
            return [[Sample(sampled, logp, False), wrong] for _ in counts]

        def close(self):
            pass

    tokenizer = drifting_tokenizer()
    text = tokenizer.decode(sampled, skip_special_tokens=True)
    assert len(tokenizer(text).input_ids) == 1  # the text is no carrier of the ids
    config = config_for(OneWord).training(group_size=2)
    runner = runner_with(config, Engine(), tokenizer)
    request = RolloutRequest(["p"], [2], temperature=1.0, seed=0)
    groups = runner.rollout(request).groups
    buffer = ExGRPOReplayBuffer(group_size=2)
    buffer.add(groups, iteration=1)
    restored = ExGRPOReplayBuffer.from_checkpoint(buffer.save_to_path(tmp_path / "b"))
    (candidate,) = restored.sample(1)[0].candidates
    rows = rows_from_groups(groups)
    for ids, logps in (
        (groups[0].completions[0].token_ids, groups[0].completions[0].behavior_logp),
        (candidate.token_ids, candidate.behavior_logp),
        (rows.token_ids[: rows.lengths_B[0]], rows.behavior_logp[: rows.lengths_B[0]]),
    ):
        np.testing.assert_array_equal(ids, sampled)
        np.testing.assert_array_equal(logps, logp)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_report_27_special_token_text_in_a_question_is_ordinary_text():
    # bug report 27
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(
        {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    )
    tokenizer.chat_template = CHATML
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def prompt(question, **knobs):
        formatter = PromptFormatter(tokenizer, **knobs)
        return formatter.token_ids([{"role": "user", "content": question}]).tolist()

    question = "What does <|im_end|> mean?"
    ids = prompt(question)
    assert ids.count(end) == prompt("What does it mean?").count(end) == 1
    # The model still reads the question as it stands.
    assert question in tokenizer.decode(ids)
    assert prompt(question, split_special_tokens=False).count(end) == 2


def test_report_28_an_id_with_two_questions_is_refused(tmp_path):
    # bug report 28
    rows = [
        {"id": "q1", "prompt": "one", "answer": "1"},
        {"id": "q2", "prompt": "two", "answer": "2"},
        {"id": "q1", "prompt": "three", "answer": "3"},
    ]
    path = write(tmp_path / "data.parquet", rows)
    for in_memory, message in ((None, "another question"), (0, "an id used before")):
        env = RowsEnv(
            data=path,
            id_column="id",
            max_rows_in_memory=in_memory,
            cache_dir=tmp_path,
        )
        with pytest.raises(ValueError, match=rf"{message}.*1 \(rows 2\)"):
            _ = env.prompt_ids
    # Without the column, ids are made so that no two questions share one.
    assert len(set(RowsEnv(data=path).prompt_ids)) == 3


def test_report_28_groups_are_by_problem_where_questions_repeat(tmp_path):
    # bug report 28
    rows = [{"id": i, "prompt": q, "answer": "1"} for i, q in enumerate("abab")]
    path = write(tmp_path / "data.parquet", rows)
    env = RowsEnv(data=path, id_column="id")
    drawn = PromptCycle(env.prompt_ids, seed=0).draw(4)
    assert sorted(drawn) == [0, 1, 2, 3]

    class Engine:
        def sample(self, prompts, counts, **kwargs):
            one = tiny_tokenizer()("1").input_ids
            answers = [np.array(one, np.int32), np.array([2, 2], np.int32)]
            logps = [np.zeros(len(a), np.float32) for a in answers]
            right, wrong = (
                Sample(a, logp, False) for a, logp in zip(answers, logps, strict=True)
            )
            # One, two, three, one of four are right.
            return [
                [right] * (1 + n % 3) + [wrong] * (3 - n % 3)
                for n, _ in enumerate(counts)
            ]

        def close(self):
            pass

    runner = runner_with(config_for(RowsEnv, data=path, id_column="id"), Engine())
    request = RolloutRequest(drawn, [4] * 4, temperature=1.0, seed=0)
    groups: list[Group] = runner.rollout(request).groups
    assert [len(g.completions) for g in groups] == [4] * 4
    advantages = rows_from_groups(groups).advantages_B.reshape(4, 4)
    # k of 4 right: k advantages of 1 - k/4, the others -k/4.
    np.testing.assert_allclose(advantages[0], [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(advantages.sum(1), 0, atol=1e-6)
    buffer = ExGRPOReplayBuffer(group_size=4)
    buffer.add(groups, iteration=1)
    assert len(buffer) == 4


class ThreeRunners:
    """Three env runners that answer in another order than they were asked."""

    local_env_runner = None

    def __init__(self, runners):
        self._runners = runners
        self._done = []

    def num_remote_env_runners(self):
        return len(self._runners)

    def healthy_env_runner_ids(self):
        return list(self._runners)

    def foreach_env_runner_async(self, name, *, tag, kwargs, remote_worker_ids):
        (runner_id,) = remote_worker_ids
        result = getattr(self._runners[runner_id], name)(**kwargs)
        self._done.insert(0, (runner_id, result))

    def fetch_ready_async_reqs(self, *, tags, timeout_seconds):
        return [self._done.pop(0)]


def test_report_29_completions_meet_their_own_gold_with_three_env_runners():
    # bug report 29
    tokenizer = tiny_tokenizer()

    class RightEngine:
        def sample(self, prompts, counts, **kwargs):
            numbers = [int(tokenizer.decode(ids).split()[0]) for ids in prompts]
            answers = [tokenizer(str(2 * k)).input_ids for k in numbers]
            return [
                [Sample(np.array(a, np.int32), np.zeros(len(a), np.float32), False)] * n
                for a, n in zip(answers, counts, strict=True)
            ]

        def close(self):
            pass

    config = config_for(DoublesEnv)
    runners = {i: runner_with(config, RightEngine(), worker_index=i) for i in (1, 2, 3)}
    dispatcher = RolloutDispatcher(
        ThreeRunners(runners),
        revive=lambda: None,
        seed=0,
        weights_version=lambda: 0,
    )
    drawn = PromptCycle(range(32), seed=1).draw(32)
    dispatcher.start(drawn, [4] * 32, temperature=1.0, steps_done=0)
    groups = groups_of(dispatcher.collect())
    assert [g.prompt_id for g in groups] == drawn
    rewards = np.concatenate([g.rewards_G for g in groups])
    assert rewards.shape == (128,) and rewards.mean() == 1.0


def test_report_28_and_29_hold_for_shuffled_files(tmp_path, caplog):
    # bug reports 28, 29: an id names its question, wherever its row stands.
    rows = [{"question": f"{k}?", "gold": k} for k in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows[::-1])))
    columns = {"prompt_column": "question", "answer_column": "gold"}
    with caplog.at_level(logging.INFO):
        first, second = (
            RowsEnv(data=tmp_path / name, **columns) for name in ("a.jsonl", "b.jsonl")
        )
        for prompt_id in first.prompt_ids:
            assert first.problem(prompt_id) == second.problem(prompt_id)
    assert "20 problems from 20 rows" in caplog.text
