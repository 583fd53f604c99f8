"""`rllib replay`: what it prints of a buffer, and what it refuses."""

import json
import subprocess
import sys

import numpy as np
import pytest
from replay_helpers import completion, group

from rllib_exgrpo.cli import main
from rllib_exgrpo.policy import load_tokenizer, tokenizer_hash
from rllib_exgrpo.records import Group
from rllib_exgrpo.replay.audit import AUDIT_FOLDER, Audit, audit_table
from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.files import ReplayFiles
from rllib_exgrpo.replay.folder import Folder

TOKENIZER = load_tokenizer("tiny-arithmetic")
METADATA = {
    "model": "tiny-arithmetic",
    "tokenizer": tokenizer_hash(TOKENIZER),
    "environment": "ArithmeticEnv",
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with two checkpoints and the audit of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("run") / "trial"
    buffer, files = ReplayBuffer(group_size=4, seed=0, metadata=METADATA), ReplayFiles()
    audit = Audit(Folder.at(folder / AUDIT_FOLDER))
    text = completion(TOKENIZER("17 + 4 = \\boxed{21}").input_ids, version=1)
    wrong = [completion([0], 0.0)] * 3
    groups = [group(i, 1 + i % 3, version=1, source="hard") for i in range(6)]
    groups += [Group("sum", np.zeros(1, np.int32), [text, *wrong], source="easy")]
    buffer.record([*groups, group("done", 4)], 1)
    for step in (2, 3):
        files.save(buffer, Folder.at(folder / f"checkpoint_{step}" / "replay_buffer"))
        draws = sorted(buffer.draw(9, step), key=lambda d: str(d.prompt_id))
        chosen = buffer.choose(
            draws, [np.linspace(0.1, 0.3, len(d.candidates)) for d in draws]
        )
        sums = {c.prompt_id: np.array([8.0, 6.0, 2.0]) for c in chosen}
        correct = {c.prompt_id: 2 for c in chosen}
        audit.write(audit_table(step, "lowest_entropy", chosen, sums, correct))
        buffer.record([group(0, 3, version=step, first=50), group(5, 4)], step)
    files.save(buffer, Folder.at(folder / "checkpoint_4" / "replay_buffer"))
    return folder.parent


@pytest.fixture
def replay(capsys, tmp_path_factory):
    """Runs `rllib replay` and returns the lines that it prints."""
    folder = str(tmp_path_factory.getbasetemp())

    def call(*arguments):
        assert main(["replay", *map(str, arguments)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(len(line.replace(folder, "")) for line in lines) <= 100
        return lines

    return call


def cells(lines, first):
    """The words of the only line that starts with a word."""
    (line,) = [line.split() for line in lines if line.split()[:1] == [first]]
    return line


def test_stats_show_buckets_and_distributions(replay, run_folder):
    lines = replay("stats", run_folder)
    # Prompts 0 to 5 began in the buckets 1, 2, 3, 1, 2, 3; 0 moved to 3, 5 retired.
    assert cells(lines, "1/4")[1] == "2"
    assert cells(lines, "3/4")[1] == "2"
    assert cells(lines, "4/4")[1:] == ["2", "#" * 40, "retired"]
    assert cells(lines, "hard") == ["hard", "5", "12", "1"]
    assert any("after step 3, weights version 3, groups of 4" in line for line in lines)


def test_list_starts_with_the_hardest_and_filters(replay, run_folder):
    lines = replay("list", run_folder)
    assert [line.split()[1] for line in lines[1:7]] == [
        f"{k}/4" for k in (1, 1, 2, 2, 3, 3)
    ]
    assert lines[-1] == "6 of 6 prompts, by bucket."
    # Prompt 0 got completions of weights 2, the others are of weights 1.
    assert cells(replay("list", run_folder, "--max-age", 1), "0")[5] == "1"
    (header, *rows, _, last) = replay(
        "list", run_folder, "--bucket", 1, "--source", "easy", "--limit", 1
    )
    assert header.split()[0] == "prompt"
    assert [row.split()[0] for row in rows] == ['"sum"']
    assert last == "1 of 1 prompts, by bucket."
    lines = replay("list", run_folder, "--sort", "length", "--descending")
    assert lines[1].startswith('"sum"')


@pytest.mark.parametrize("name", ["sum", '"sum"'])
def test_show_decodes_completions_and_says_what_is_missing(replay, run_folder, name):
    lines = replay("show", run_folder, name)
    assert lines[0] == 'Prompt "sum": 1 of 4 correct at step 1, replays 2.'
    assert "    17 + 4 = \\boxed{21}" in lines
    assert any("No text of the prompt" in line for line in lines)  # no config beside it


def test_show_falls_back_to_token_ids(replay, tmp_path):
    buffer = ReplayBuffer(group_size=4, metadata={**METADATA, "tokenizer": "other"})
    buffer.record([group(1, 2)], 1)
    ReplayFiles().save(buffer, Folder.at(tmp_path))
    lines = replay("show", tmp_path, 1)
    assert any("another one here" in line for line in lines)
    assert [line for line in lines if line.strip().isdecimal()] == ["    1", "    2"]


def test_audit_answers_why_a_prompt_was_replayed(replay, run_folder):
    lines = replay("audit", run_folder, "--iteration", 2)
    assert lines[0] == "Replayed at step 2; completions chosen by lowest_entropy."
    # Bucket 1 holds 3 prompts; Normal(k / 4; 1 / 2, 1 / 4) gives it 0.6065 / 2.2131.
    assert cells(lines, '"sum"') == [
        '"sum"', "2", "1", "9.1", "%", "0.100", "0.100", "1", "of", "1", "1", "8",
        "0.750", "25", "%", "2",
    ]  # fmt: skip
    steps = replay("audit", run_folder / "trial" / "checkpoint_2")
    assert [cells(steps, step)[1] for step in "23"] == ["7", "6"]
    assert len(cells(replay("audit", run_folder, "--prompt", "sum"), "k,")) > 3


def test_diff_counts_moves(replay, run_folder):
    trial = run_folder / "trial"
    lines = replay("diff", trial / "checkpoint_2", trial / "checkpoint_4")
    found = {line[:32].strip(): line[32:].strip() for line in lines[:9]}
    assert found["prompts in both"] == "8"
    assert found["solved more often"] == "2"  # 0 and 5
    assert found["retired since"] == "1"
    # Two groups of 3 successes with equal tokens; those of prompt 5 went.
    assert found["completions only in the second"] == "3"
    assert found["completions only in the first"] == "3"
    assert any(line.split() == ["0", "1/4", "3/4"] for line in lines)


def test_export_and_merge_write_files(replay, run_folder, tmp_path):
    replay("export", run_folder, "--output", tmp_path / "all.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").open()]
    assert len(rows) == 13  # 4, 2, 3, 1, 2 and that of "sum"
    trial = run_folder / "trial"
    lines = replay(
        "merge",
        trial / "checkpoint_2",
        trial / "checkpoint_4",
        "--output",
        tmp_path / "c",
    )
    assert lines[0].startswith("6 prompts with 13 completions, and 2 retired prompts")
    assert any("6 prompts" in line for line in replay("stats", tmp_path / "c"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stats", "nowhere"], ["nowhere", "no saved replay buffer"]),
        (["show", "{run}", "x"], ["'x'", "rllib replay list"]),
        (["audit", "{run}", "--iteration", "99"], ["99", "steps 2 to 3"]),
        (["list", "{run}", "--bucket", "99"], ["--bucket is 99", "0 to 3"]),
        (["audit", "{run}", "--prompt", "never"], ["never"]),
        (["audit", "nowhere"], ["replay_audit"]),
        (["merge", "{run}", "{run}", "--output", "{run}"], ["exists"]),
    ],
)
def test_what_cannot_be_done_is_one_paragraph(capsys, run_folder, arguments, words):
    arguments = [argument.format(run=run_folder) for argument in arguments]
    assert main(["replay", *arguments]) == 2
    message = capsys.readouterr().err
    assert [word for word in words if word not in " ".join(message.split())] == []
    assert "Traceback" not in message


def test_a_negative_number_of_lines_is_refused(capsys, run_folder):
    with pytest.raises(SystemExit):
        main(["replay", "list", str(run_folder), "--limit", "-3"])
    assert "'-3' is no number of lines" in capsys.readouterr().err


def test_a_reader_that_wants_no_more_gets_no_message(run_folder):
    command = [sys.executable, "-m", "rllib_exgrpo.cli", "replay", "stats", run_folder]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()  # before anything is printed
        assert process.stderr.read() == ""
    assert process.returncode == 141  # as of a command that SIGPIPE ended
