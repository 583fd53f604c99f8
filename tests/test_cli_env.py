"""`rllib env`, `rllib verify`, and the page on writing an environment."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rllib_exgrpo.cli import main
from rllib_exgrpo.cli.env import template

PAGE = (Path(__file__).parents[1] / "docs" / "environments.md").read_text()


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """A fresh current folder whose modules do not outlive the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    yield tmp_path
    sys.modules.pop("letter_count", None)


def refusal(capsys, *arguments):
    assert main([str(a) for a in arguments]) == 2
    return " ".join(capsys.readouterr().err.split())


# --- environments


def test_a_new_environment_passes_the_check(in_folder, capsys):
    for k, name in enumerate(("LetterCountEnv", "letter-count", "letter_count.py")):
        folder = in_folder / f"new_{k}"
        assert main(["env", "new", name, "--folder", str(folder)]) == 0
        files = sorted(path.name for path in folder.iterdir())
        assert files == ["letter_count.py", "test_letter_count.py"]
    assert main(["env", "new", "letter_count"]) == 0
    capsys.readouterr()
    assert main(["env", "check", "letter_count:LetterCountEnv"]) == 0
    out = capsys.readouterr().out
    assert "0 of 9 checks failed" in out
    assert out.count("\nok ") + out.startswith("ok ") == 9


@pytest.mark.slow  # imports everything in two more processes
def test_the_test_of_a_new_environment_passes(in_folder):
    assert main(["env", "new", "letter_count"]) == 0
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_letter_count.py"],
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_the_page_shows_what_is_written_and_its_settings_work(in_folder):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    module, _ = template("letter_count", "LetterCountEnv")
    assert blocks[0] == module
    scope: dict = {"__name__": "page"}
    exec(blocks[0], scope)
    env = scope["LetterCountEnv"](split="heldout")
    env.reset(options={"prompt_id": "pepper/p"})
    assert env.step("p, p, p. Answer: 3")[1] == 1.0
    assert env.self_check() == []
    adapters = "from rllib_exgrpo.envs import ReasoningGymEnv, VerifiersEnv\n"
    exec(adapters + blocks[1], {})  # creating one needs no package; loading does


def test_a_broken_environment_makes_the_exit_code_1(in_folder, capsys):
    text = (
        "from rllib_exgrpo.envs import ArithmeticEnv\n"
        "class LetterCountEnv(ArithmeticEnv):\n"
        "    def gold_completion(self, problem):\n"
        "        return 'no box'\n"
    )
    (in_folder / "letter_count.py").write_text(text)
    flags = ["--env-config", '{"num_problems": 5}', "--max-problems", "3"]
    assert main(["env", "check", "letter_count:LetterCountEnv", *flags]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "error gold answers: 3 of 3 gold answers score below 1.0" in out


def test_environments_are_listed(capsys):
    assert main(["env", "list"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^CountdownEnv +Asks for an expression", out, re.MULTILINE)
    assert "TableEnv" not in out


def test_what_cannot_be_new_or_checked_is_told(in_folder, capsys):
    assert "'2x' cannot name" in refusal(capsys, "env", "new", "2x")
    (in_folder / "test_x.py").touch()
    assert "exists already" in refusal(capsys, "env", "new", "x")
    assert "'CountdownEnv'" in refusal(capsys, "env", "check", "countdown")
    assert "no_such" in refusal(capsys, "env", "check", "no_such:Env")


# --- verdicts

ROWS = [
    {"gold": "7", "completion": r"\boxed{7}", "correct": True, "source": "a"},
    {"gold": "7", "completion": r"\boxed{8}", "correct": False, "source": "a"},
    {"gold": "7", "completion": "7", "correct": True, "source": "b"},
    {"gold": 0.5, "completion": r"\boxed{\frac12}", "source": "b"},
    {"gold": "x", "completion": r"\boxed{y}", "correct": True, "ambiguous": True},
]


@pytest.fixture
def write(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_verdicts_are_written_and_summed_up(write, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    assert main(["verify", str(write(ROWS)), "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "5 answers in" in out and "0 time-outs" in out
    assert "Accuracy: 2 of 3 as labelled (66.7%)." in out
    assert "Ambiguous, counted apart: 0 of 1 as labelled" in out
    # rows, of which labelled correct and not, and ambiguous ones
    assert re.search(r"^ok +2 +1 +0 +0$", out, re.MULTILINE)
    assert re.search(r"^wrong +2 +0 +1 +1$", out, re.MULTILINE)
    assert re.search(r"^no_answer +1 +1 +0 +0$", out, re.MULTILINE)
    assert "b: 1 of 2 ok; 0 of 1 as labelled" in out
    judged = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["reason"] for row in judged][:3] == ["ok", "wrong", "no_answer"]
    assert [row["reward"] for row in judged][:3] == [1.0, 0.0, 0.0]
    assert judged[0].items() >= ROWS[0].items()
    assert [p.name for p in tmp_path.glob("*.partial")] == []


def test_a_parquet_of_completions_with_other_columns(tmp_path, capsys):
    rows = [
        {"answer": {"truth": "2"}, "text": r"\boxed{2}", "data_source": "amc"},
        {"answer": {"truth": "3"}, "text": r"\boxed{2}", "data_source": "aime"},
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    columns = ["--gold-column", "answer.truth", "--completion-column", "text"]
    sources = ["--source-column", "data_source"]
    assert main(["verify", str(path), *columns, *sources]) == 0
    out = capsys.readouterr().out
    assert "aime: 0 of 1 ok" in out and "amc: 1 of 1 ok" in out
    assert "Accuracy" not in out  # nothing is labelled


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "a.jsonl",
            '{"gold": "1", "completion": "1"}\n{"gold": "1"}\n',
            "row 2 has no 'completion'; it has ['gold']",
        ),
        ("a.jsonl", '{"gold"\n', "line 1 is not JSON: Expecting ':'"),
        ("a.jsonl", "[1]\n", "line 1 is no JSON object"),
        ("a.txt", "", ".jsonl or a .parquet"),
    ],
)
def test_files_that_cannot_be_judged_are_told(tmp_path, capsys, name, text, words):
    (tmp_path / name).write_text(text)
    output = ("--output", tmp_path / "out.jsonl")
    assert words in refusal(capsys, "verify", tmp_path / name, *output)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    missing = refusal(capsys, "verify", tmp_path / "none.jsonl")
    assert "none.jsonl" in missing and "no such file" in missing
