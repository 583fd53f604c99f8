"""The `rllib` command: what it refuses before it starts, and a run to its end."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from pyarrow.fs import LocalFileSystem
from ray.train._internal.checkpoint_manager import _CheckpointManager
from ray.train._internal.session import _TrainingResult
from ray.tune import Checkpoint
from report_helpers import make_run

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.checkpoints import mark_complete
from rllib_exgrpo.cli import main
from rllib_exgrpo.cli._display import Display
from rllib_exgrpo.cli._errors import CommandError, error_summary, paragraph
from rllib_exgrpo.cli._logs import keep_logs, link_logs
from rllib_exgrpo.cli._options import RunOptions
from rllib_exgrpo.cli._outcome import best_checkpoint, failure
from rllib_exgrpo.cli._progress import (
    Progress,
    format_duration,
    format_pass_at_1,
    outcome,
    step_parts,
)
from rllib_exgrpo.cli._tune import checkpoint_config
from rllib_exgrpo.evaluation.questions import read_questions
from rllib_exgrpo.learning_curve import read_results
from rllib_exgrpo.metric_names import find_metric

ENV = "rllib_exgrpo.envs:ArithmeticEnv"
SMALL = {
    "max_prompt_tokens": 64,
    "max_completion_tokens": 64,
    "prompts_per_step": 4,
    "prompts_per_update": 4,
    "group_size": 4,
    "engine_kwargs": {"enforce_eager": True},
    "evaluation_interval": 2,
    "evaluation_max_prompts": 16,
}
FILE = """
from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import ArithmeticEnv

class OwnEnv(ArithmeticEnv):
    pass

config = ExGRPOConfig().environment(OwnEnv).update_from_dict({small})
config.evaluation(evaluation_config={{"env_config": {{"split": "heldout"}}}})
stop = {{"training_iteration": 2}}
"""


def rllib(*arguments, cwd):
    """Runs the command as a user would, from a folder outside the repository."""
    root = Path(__file__).resolve().parent.parent
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_AUTH_MODE"}
    return subprocess.run(
        [sys.executable, "-m", "rllib_exgrpo.cli", *map(str, arguments)],
        cwd=cwd,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=600,
    )


# --- what is refused before anything starts


def refusal(capsys, *arguments):
    """Returns the message of a command that must end with exit code 2."""
    assert main([str(a) for a in arguments]) == 2
    return " ".join(capsys.readouterr().err.split())


def train(**config):
    flags = ["train", "--algo", "ExGRPO", "--stop", '{"training_iteration": 1}']
    return [*flags, "--config", json.dumps({"env": ENV, **SMALL, **config})]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"replay_ration": 0.5}, ["`replay_ration`", "`replay_ratio`"]),
        ({"replay_buffer_config": {"muu": 1}}, ["'muu'", "'mu'"]),
        ({"replay_ratio": 1.5}, ["`replay_ratio`", "1.5"]),
        ({"group_size": 1}, ["`group_size`", "at least 2"]),
        ({"group_size": "8"}, ["`group_size`", "'8'", "whole number"]),
        ({"max_prompt_tokens": 3}, ["`max_prompt_tokens`=3", "Raise"]),
        (
            {"model_name_or_path": "/no/such/model"},
            ["/no/such/model", "no such folder"],
        ),
        ({"env": "Unknown"}, ["'Unknown'", "MODULE:CLASS"]),
        ({"env": "rllib_exgrpo.envs:ArithmetikEnv"}, ["'ArithmeticEnv'"]),
        ({"env": "no_such_module:Env"}, ["no_such_module"]),
        ({"env": "CartPole-v1"}, ["prompt_ids"]),
        ({"env_config": {"spilt": "train"}}, ["`spilt`", "`split`"]),
        (
            {"env": "rllib_exgrpo.envs:MathEnv", "env_config": {"data": "no.parquet"}},
            ["no.parquet", "`data`"],
        ),
        (
            {"evaluation_config": {"env_config": {"split": "test"}}},
            ["the evaluation", "'test'", "'heldout'"],
        ),
    ],
)
def test_a_bad_setting_is_one_paragraph(capsys, config, words):
    message = refusal(capsys, *train(**config))
    assert [word for word in words if word not in message] == []
    assert "Traceback" not in message
    assert "suppress" not in message


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ({"training_iterations": 1}, ["'training_iterations'", "'training_iteration'"]),
        ({"training_iteration": "1"}, ["'1'", "number"]),
        ({}, ["no stop criterion"]),
        ({"evaluation/pass_at_1": 0.9}, ["`evaluation_interval`"]),
    ],
)
def test_a_bad_stop_criterion_is_one_paragraph(capsys, stop, words):
    config = json.dumps({**SMALL, "evaluation_interval": None})
    flags = ["--algo", "ExGRPO", "--env", ENV, "--config", config]
    message = refusal(capsys, "train", *flags, "--stop", json.dumps(stop))
    assert [word for word in words if word not in message] == []


def test_runs_that_cannot_be_compared_are_told(capsys, tmp_path):
    assert "holds no results" in refusal(capsys, "compare", tmp_path, tmp_path)
    assert "`vs` between" in refusal(capsys, "compare", "a", "b", "c")
    assert "`vs` between" in refusal(capsys, "compare", "a", "vs")
    assert "no result.json" in refusal(capsys, "report", tmp_path)


def test_two_sides_are_compared_by_question(capsys, tmp_path):
    for seed, name in enumerate(["a0", "a1", "b0", "b1"]):
        make_run(tmp_path / name, seed=seed)
    folders = [str(tmp_path / name) for name in ("a0", "a1", "b0", "b1")]
    assert main(["compare", *folders[:2], "vs", *folders[2:], "--set", "hard"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"A  {folders[0]}, after 24 steps"
    name, questions, *_ = lines[-1].split()
    assert (name, questions) == ("hard", "20")
    assert lines[-1].endswith(("no difference shown", "is better"))
    assert "0, 8, 16, 24" in refusal(capsys, "compare", *folders[:2], "--step", 5)


def test_other_algorithms_and_mixed_forms_are_refused(capsys, tmp_path):
    assert "'PPO'" in refusal(capsys, "train", "--algo", "PPO", "--env", ENV)
    assert "either" in refusal(capsys, "train", "file", "x.py", "--algo", "ExGRPO")
    assert "either" in refusal(capsys, "train")
    message = refusal(capsys, "train", "--algo", "ExGRPO", "--stop", '{"x": 1}')
    assert "'x'" in message
    assert "no checkpoint" in refusal(capsys, "evaluate", tmp_path)
    assert "no checkpoint" in refusal(capsys, "export", tmp_path, tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", "x = 1", ["`config`", "missing"]),
        ("a.py", "config = {}", ["`config`", "dict"]),
        ("a.py", "x = 1\nx.y", ["a.py", "AttributeError", "line 2"]),
        ("a.txt", "", [".py or a .yaml"]),
        ("a.yaml", "[1]", ["one experiment"]),
        ("a.yaml", "a: {b: ]", ["not YAML"]),
        ("a.yaml", "e: {run: ExGRPO, sotp: {}}", ["`sotp`", "`stop`"]),
        ("a.yaml", "e: {run: PPO}", ["'PPO'"]),
        ("a.yaml", "e: {run: ExGRPO, config: {lrr: 1}}", ["`lrr`", "`lr`"]),
    ],
)
def test_a_bad_file_is_told(capsys, tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    message = refusal(capsys, "train", "file", path)
    assert [word for word in words if word not in message] == []


def test_an_option_that_is_no_json_object_is_a_usage_error(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--stop", "{a: 1}"])
    assert "is not JSON" in capsys.readouterr().err


def test_examples_can_be_listed_and_read(capsys):
    assert main(["example", "list"]) == 0
    assert "exgrpo_qwen2.5_math_7b " in capsys.readouterr().out
    assert main(["example", "get", "exgrpo_arithmetic_cpu"]) == 0
    compile(capsys.readouterr().out, "example", "exec")
    assert "there are exgrpo_arithmetic_cpu" in refusal(capsys, "example", "get", "x")


# --- what is printed


def step(iteration, seconds, **parts):
    return {
        "training_iteration": iteration,
        "time_total_s": seconds,
        "time_this_iter_s": 2.0,
        "env_runners": {
            "pass_rate": 0.25,
            "tokens_per_second": 1234.5,
            "num_prompts": 6.0,
            "num_completions": 48.0,
        },
        "timers": {
            "rollout_s": 1.0,
            "update_s": 0.6,
            "plan_s": 0.0,
            "record_s": 0.01,
            "sync_s": 0.19,
        },
        "replay": {"prompts": 7.0, "retired": 1.0, "num_prompts_replayed": 3.0},
        **parts,
    }


def test_progress_lines_align_and_hold_the_numbers():
    at_start = {"pass_at_1": 0.351, "pass_at_1_stderr": 0.024}
    progress = Progress({"training_iteration": 10})
    lines = progress.lines(step(1, 2.0, evaluation_at_start=at_start))
    lines += progress.lines(step(2, 4.0, evaluation={"hard": {"pass_at_1": 0.4}}))
    header, start, first, second = lines
    assert start.split() == ["0", "35.1", "±", "2.4"]
    cells = [" ".join(line.split()) for line in (first, second)]
    assert cells == [
        "1 25.0 % 0.50 7 1 1,234 2.0 1.0 0.6 ?",
        "2 25.0 % 40.0 0.50 7 1 1,234 2.0 1.0 0.6 16 s",
    ]
    assert len(header) == len(first) == len(second)


def test_the_parts_of_a_step_add_up_and_the_longest_come_first():
    assert step_parts(step(1, 2.0)) == (
        "2.0 s: rollout 1.0, update 0.6, other 0.2, sync 0.2"
    )
    evaluated = step(1, 2.0, time_this_iter_s=9.0, evaluation={})
    assert step_parts(evaluated).startswith("9.0 s: evaluation and other 7.2, rollout")


class Terminal(io.StringIO):
    """A terminal that knows the two codes that move up and clear."""

    def isatty(self):
        return True

    @property
    def screen(self):
        lines = [""]
        for part in re.split(r"(\n|\x1b\[\d+F|\x1b\[J)", self.getvalue()):
            if part == "\n":
                lines.append("")
            elif part.endswith("F"):
                lines = lines[: -int(part[2:-1])]
                lines[-1] = ""
            elif part != "\x1b[J":
                lines[-1] += part
        return lines


def test_a_terminal_shows_one_table_below_the_evaluations(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    display = Display(Progress({"training_iteration": 4}), terminal)
    at_start = {"pass_at_1": 0.351, "pass_at_1_stderr": 0.024}
    for i in (1, 2, 3):
        parts = {"evaluation_at_start": at_start} if i == 1 else {}
        parts |= {"evaluation": {"pass_at_1": 0.5}} if i == 2 else {}
        display.on_trial_result(i, [], None, step(i, 2.0 * i, **parts))
    lines = [line.strip() for line in terminal.screen]
    assert lines[:2] == [
        "Held-out pass@1 35.1 ± 2.4 % after 0 steps",
        "Held-out pass@1 50.0 % after 2 steps",
    ]
    bar = "#" * 22 + "-" * 8
    assert lines[3] == f"progress    [{bar}] 75 %, step 3, 2 s left"
    assert "held-out    pass@1 50.0 % after 2 steps" in lines
    assert "replay      rho 0.50, 7 prompts in the buffer, 1 retired" in lines
    assert len(lines) == 11
    display.on_experiment_end([])
    assert not any("this step" in line for line in terminal.screen)
    assert len(terminal.screen) == 10


def test_a_resumed_run_goes_on_in_the_table_and_messages_stay_above(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    earlier = [step(2, 4.0, evaluation={"pass_at_1": 0.5}), step(3, 6.0)]
    progress = Progress({"training_iteration": 4}, earlier)
    display = Display(progress, terminal, latest=earlier[-1:])
    message = "SIGINT: ending. " + "word " * 30
    display.say(message)
    assert terminal.getvalue() == ""  # a signal handler must not print
    display.on_step_end(1, [])
    display.on_trial_result(1, [], None, step(4, 8.0))
    assert terminal.screen[0] == message
    lines = [line.strip() for line in terminal.screen]
    assert lines[2].endswith("100 %, step 4, ? left")
    assert "held-out    pass@1 50.0 % after 2 steps" in lines
    assert len(lines) == 10


def test_what_is_no_terminal_gets_a_line_a_step():
    stream = io.StringIO()
    display = Display(Progress({"training_iteration": 4}), stream)
    for i in (1, 2):
        display.on_trial_result(i, [], None, step(i, 2.0 * i))
        display.on_step_end(i, [])
    assert "\x1b" not in stream.getvalue()
    # A legend of five lines between two empty ones, the header, and two steps.
    assert len(stream.getvalue().splitlines()) == 10


def test_logs_are_linked_at_once_and_kept_at_the_end(tmp_path):
    session, run = tmp_path / "session_1", tmp_path / "run"
    (session / "logs" / "old").mkdir(parents=True)
    (session / "logs" / "worker.out").write_text("engine started")
    (session / "logs" / "worker.err").write_text("")
    (session / "logs" / "latest").symlink_to(session / "logs" / "worker.out")
    link = link_logs(session, run)
    assert (run / "logs" / "session_1" / "worker.out").read_text() == "engine started"
    keep_logs(link)
    shutil.rmtree(session)
    kept = run / "logs" / "session_1"
    assert sorted(p.name for p in kept.rglob("*")) == ["old", "worker.out"]
    assert list(kept.parent.iterdir()) == [kept]
    assert link_logs(tmp_path / "elsewhere", run) is None


def test_time_left_follows_the_nearest_criterion_and_recent_steps():
    progress = Progress({"training_iteration": 100, "time_total_s": 50})
    # 2 s a step: 98 steps need 196 s, but only 46 s are allowed.
    assert math.isnan(progress.seconds_left(step(1, 2.0)))
    assert progress.seconds_left(step(2, 4.0)) == 46
    slower = Progress({"training_iteration": 40})
    for i in range(1, 11):
        slower.seconds_left(step(i, i * 1.0))
    for i in range(11, 21):
        left = slower.seconds_left(step(i, 10 + (i - 10) * 3.0))
    assert left == pytest.approx(20 * 3.0)  # the slow early speed is forgotten


def test_time_left_is_unknown_without_a_steady_criterion():
    left = Progress({"env_runners/pass_rate": 0.9}).seconds_left(step(1, 2.0))
    assert format_duration(left) == "?"


def test_durations():
    assert [format_duration(s) for s in (8, 89, 100, 3600, 5400, 86460)] == [
        "8 s",
        "89 s",
        "2 min",
        "60 min",
        "1:30 h",
        "24:01 h",
    ]


def test_outcome_tells_before_after_and_gain():
    before = {"pass_at_1": 0.35, "pass_at_1_stderr": 0.02}
    after = {"pass_at_1": 0.6, "pass_at_1_stderr": 0.01}
    steps = [step(1, 1.0, evaluation_at_start=before), step(2, 2.0, evaluation=after)]
    assert outcome(steps) == (
        "Held-out pass@1: 35.0 ± 2.0 % before, 60.0 ± 1.0 % after 2 steps: "
        "+25.0 points."
    )
    assert outcome(steps[1:]) == "Held-out pass@1: 60.0 ± 1.0 % after 2 steps."
    assert "not measured" in outcome([step(1, 1.0)])
    assert format_pass_at_1({"pass_at_1": 0.5, "pass_at_1_stderr": float("nan")}) == (
        "50.0"
    )


def test_errors_of_dead_processes_name_the_error_inside():
    text = "The actor died.\n  File x\nValueError: bad knob\nmore\nValueError: bad knob"
    assert error_summary(RuntimeError(text)) == (
        "RuntimeError: The actor died.\nValueError: bad knob"
    )


def test_a_full_memory_is_told_by_name():
    # The beginning of what Ray says; pages follow.
    text = (
        "Failure # 1 (occurred at 2026-12-01)\n1 worker(s) were killed due to the node "
        "running low on memory. Memory on the node (IP: 1.2.3.4, ID: 04) was 22.39GB "
        "used / 23.54GB limit (0.95)\nOOM kill reason: ...\n" + "more\n" * 50
    )
    told = failure(RuntimeError(text), [], Path("results/own"))
    assert "before the end of step 1: the machine's memory was full, 22.39GB of" in told
    assert "lower `num_env_runners`" in told
    assert "more" not in told


def test_paragraphs_keep_indented_lines():
    text = paragraph("word " * 40 + "\n    " + "x" * 100)
    assert max(map(len, text.splitlines()[:-1])) <= 88
    assert text.splitlines()[-1] == "    " + "x" * 100


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path):
    config = ExGRPOConfig().evaluation(
        evaluation_interval=4, best_checkpoint_set="evaluation"
    )
    manager, results = _CheckpointManager(checkpoint_config(config, RunOptions())), []
    for i, score in enumerate([0.4, 0.5, 0.3, math.nan]):
        folder = tmp_path / f"checkpoint_{i:06}"
        folder.mkdir()
        checkpoint = Checkpoint.from_directory(folder)
        manager.register_checkpoint(
            _TrainingResult(checkpoint, {"checkpoint_score": score})
        )
        results.append({"training_iteration": i, "checkpoint_score": score})
        mark_complete(str(folder), LocalFileSystem(), i)
    kept = [tmp_path / f"checkpoint_{i:06}" for i in (1, 3)]
    assert sorted(tmp_path.iterdir()) == kept
    assert best_checkpoint(tmp_path, results) == kept[0]
    (kept[0] / "complete.json").unlink()
    assert best_checkpoint(tmp_path, results) is None  # step 3 was not evaluated


@pytest.mark.parametrize("option", ["checkpoint_freq", "keep_checkpoints"])
def test_options_that_contradict_the_best_checkpoint_are_refused(option):
    options = RunOptions(**{option: 2})
    options.check(None)
    with pytest.raises(CommandError, match=f"--{option.replace('_', '-')} is 2"):
        options.check("dev")


# --- runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of a file, with weights that a huge learning rate has ruined.

    Its first step has enough groups that some are partly right on any processor.
    """
    cwd = tmp_path_factory.mktemp("cli")
    small = {**SMALL, "prompts_per_step": 16, "prompts_per_update": 16, "lr": 0.05}
    small["replay_start_pass_rate"] = None
    (cwd / "own.py").write_text(FILE.format(small=small))
    return rllib("train", "file", "own.py", cwd=cwd), cwd


def test_a_run_ends_with_results_checkpoint_and_plot(trained):
    process, cwd = trained
    assert process.returncode == 0, process.stderr
    folder = cwd / "results" / "own"
    assert len(read_results(folder)) == 2
    assert len((folder / "trial" / "progress.csv").read_text().splitlines()) >= 3
    assert list((folder / "trial").glob("events.out.tfevents.*"))
    assert (folder / "trial" / "checkpoint_000000" / "replay_buffer").is_dir()
    assert (folder / "report.html").read_text().count("<figure>") > 15
    assert (folder / "report.png").is_file()
    logs = list((folder / "logs").glob("session_*/worker-*.out"))
    assert logs
    questions = read_questions(folder)
    # Both evaluations of the run, each problem of the 16 once.
    assert sorted((q.iteration, q.prompt_id) for q in questions) == sorted(
        {(q.iteration, q.prompt_id) for q in questions}
    )
    assert Counter(q.iteration for q in questions) == {0: 16, 2: 16}
    assert json.loads((folder / "trial" / "versions.json").read_text())["ray"]


def test_a_run_prints_little_and_nothing_of_ray(trained):
    process, _ = trained
    assert process.stderr == ""
    assert "Held-out pass@1: " in process.stdout
    assert "checkpoint_000000" in process.stdout
    assert len(process.stdout.splitlines()) < 30


def test_a_run_can_be_looked_into(trained, capsys):
    _, cwd = trained
    folder = str(cwd / "results" / "own")
    assert main(["replay", "list", folder]) == 0
    prompt_id = capsys.readouterr().out.splitlines()[1].split()[0]
    assert main(["replay", "show", folder, prompt_id]) == 0
    assert "\n    user: " in capsys.readouterr().out  # from the run's own environment
    assert main(["replay", "audit", folder, "--iteration", "2"]) == 0
    assert capsys.readouterr().out.startswith("Replayed at step 2")


def test_all_our_metrics_of_a_real_result_are_in_the_table(trained):
    _, cwd = trained
    last = read_results(cwd / "results" / "own")[-1]
    ours = {
        "env_runners": last["env_runners"],
        "replay": last["replay"],
        "timers": {k: v for k, v in last["timers"].items() if k.endswith("_s")},
        "learners/default_policy": last["learners"]["default_policy"],
        "evaluation": last["evaluation"],
    }
    rllibs_own = {
        "num_trainable_parameters",
        "default_optimizer_learning_rate",
        "num_healthy_workers",
        "actor_manager_num_outstanding_async_reqs",
        "num_remote_worker_restarts",
        "num_env_runners_dropped_lifetime",
    }
    names = [f"{key}/{n}" for key, ms in ours.items() for n in ms.keys() - rllibs_own]
    assert len(names) > 50
    assert [n for n in names if find_metric(n) is None] == []


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_with_its_own_weights(trained):
    _, cwd = trained
    checkpoint = cwd / "results" / "own" / "trial" / "checkpoint_000000"
    options = ["--samples", 2, "--max-prompts", 32, "--output", "out.json"]
    process = rllib("evaluate", checkpoint, *options, cwd=cwd)
    assert process.returncode == 0, process.stderr
    metrics = json.loads((cwd / "out.json").read_text())
    assert (metrics["num_prompts"], metrics["num_completions"]) == (32, 64)
    # The model as it comes gets over a quarter right; the ruined one next to nothing.
    assert metrics["pass_at_1"] < 0.1


@pytest.mark.slow
def test_a_failing_run_tells_the_cause_and_exits_with_1(tmp_path):
    breaking = 'pass\n    def verify(self, completion, problem):\n        {}["gold"]'
    text = FILE.format(small=SMALL).replace("pass\n", breaking + "\n", 1)
    (tmp_path / "own.py").write_text(text)
    process = rllib("train", "file", "own.py", cwd=tmp_path)
    assert process.returncode == 1
    assert process.stderr.startswith("rllib: the run failed")
    assert "KeyError: 'gold'" in process.stderr
    assert len(process.stderr.splitlines()) < 20


@pytest.mark.slow
def test_yaml_run_with_remote_workers_never_overwrites_results(tmp_path):
    entry = {
        "run": "ExGRPO",
        "env": ENV,
        "stop": {"training_iteration": 1},
        "config": {**SMALL, "num_env_runners": 2, "num_learners": 1, "zero_stage": 1},
    }
    (tmp_path / "e.yaml").write_text(json.dumps({"e": entry}))  # JSON is YAML
    (tmp_path / "results" / "e").mkdir(parents=True)
    process = rllib("train", "file", "e.yaml", "--seed", 3, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "results" / "e-2" / "trial" / "result.json").is_file()
    assert list((tmp_path / "results" / "e").iterdir()) == []
