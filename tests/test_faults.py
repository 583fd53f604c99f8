"""Drills: processes are killed, disks are full, environments break.

A killed verifier worker is in `test_verifier_pool`, a half-written buffer file in
`test_replay_files`.
"""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import tune
from test_training import echo_config, small_config, weights_of

from rllib_exgrpo import ExGRPO
from rllib_exgrpo import exgrpo_rollout as rollout_module
from rllib_exgrpo.checkpoints import iteration_of, latest_complete
from rllib_exgrpo.exgrpo_rollout import RolloutDispatcher
from rllib_exgrpo.records import Group, RolloutResult, deal, groups_of, undeal

# --- the dispatcher, with a group of env runners that does what a test says


class Runners:
    """Remote env runners 1 and 2; `silent` ones never answer, `dying` ones die once."""

    local_env_runner = None

    def __init__(self, silent=(), dying=(), version=3):
        self.silent, self.dying, self.version = set(silent), set(dying), version
        self.dead, self.pending = set(), []

    def num_remote_env_runners(self):
        return 2

    def healthy_env_runner_ids(self):
        return [i for i in (1, 2) if i not in self.dead]

    def foreach_env_runner_async(self, method, tag, kwargs, remote_worker_ids):
        (runner,) = remote_worker_ids
        self.pending.append((runner, kwargs["request"]))

    def fetch_ready_async_reqs(self, tags, timeout_seconds):
        ready, waiting = [], []
        for runner, request in self.pending:
            if runner in self.dying:
                self.dying.remove(runner)
                self.dead.add(runner)
            elif runner in self.silent:
                waiting.append((runner, request))
            else:
                groups = [Group(i, np.zeros(1, np.int32)) for i in request.prompt_ids]
                ready.append((runner, RolloutResult(groups, self.version)))
        self.pending = waiting
        time.sleep(0.01)
        return ready

    def revive(self):
        self.dead.clear()


def dispatched(runners, timeout_s=None):
    dispatcher = RolloutDispatcher(
        runners,
        revive=runners.revive,
        seed=0,
        weights_version=lambda: 3,
        timeout_s=timeout_s,
    )
    dispatcher.start([10, 11, 12, 13], [4] * 4, temperature=1.0, steps_done=0)
    return dispatcher


def prompts_of(results):
    return [group.prompt_id for group in groups_of(results)]


@given(st.lists(st.integers()), st.integers(1, 9))
def test_dealt_items_come_back_in_order_from_even_shares(items, num_shares):
    shares = deal(items, num_shares)
    assert undeal(shares) == items
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_every_runner_gets_its_part_of_the_replayed_prompts():
    # Four replayed prompts come first and want 3 completions, four fresh ones 4: two
    # runners sample 14 each. Contiguous shares would be 12 and 16.
    runners = Runners()
    dispatcher = dispatched(runners)
    dispatcher.collect()
    dispatcher.start([*range(8)], [3] * 4 + [4] * 4, temperature=1.0, steps_done=0)
    assert [sum(request.counts) for _, request in runners.pending] == [14, 14]


def test_the_prompts_of_a_runner_that_died_are_sent_again():
    runners = Runners(dying=[2])
    assert prompts_of(dispatched(runners).collect()) == [10, 11, 12, 13]
    assert runners.dead == set()


class Doomed(Runners):
    """Both runners die whenever they are given something to do."""

    def revive(self):
        super().revive()
        self.dying = {1, 2}


def test_runners_that_keep_dying_end_the_step():
    # Two deaths a round; three in all are borne.
    with pytest.raises(RuntimeError, match="died 4 times"):
        dispatched(Doomed(dying=[1, 2])).collect()


def test_runners_that_never_come_back_end_the_step(monkeypatch):
    monkeypatch.setattr(rollout_module, "_RESTART_S", 0.1)
    runners = Runners(dying=[1, 2])
    runners.revive = lambda: time.sleep(0.05)
    with pytest.raises(RuntimeError, match="No env runner has come back"):
        dispatched(runners).collect()


def test_who_is_waited_for_is_logged_and_the_timeout_ends_it(monkeypatch, caplog):
    monkeypatch.setattr(rollout_module, "_REPORT_EVERY_S", 0.1)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RuntimeError, match=r"`sample_timeout_s`=0.3.* runners \[2\]"),
    ):
        dispatched(Runners(silent=[2]), timeout_s=0.3).collect()
    assert "env runners [2] with 2 prompts, the first being 11" in caplog.text


def test_a_runner_with_other_weights_is_an_error():
    with pytest.raises(RuntimeError, match=r"version 2; the learners' are 3"):
        dispatched(Runners(version=2)).collect()


# --- killed parts of a running algorithm


def kill_between(algo, method, pids):
    """Lets a method of the algorithm kill processes the first time it is called."""
    original = getattr(algo, method)

    def killing(*args):
        setattr(algo, method, original)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return original(*args)

    setattr(algo, method, killing)


def test_training_goes_on_after_a_killed_env_runner(ray_session):
    algo = small_config(env_runners=1).build_algo()
    algo.train()
    pids = algo.env_runner_group.foreach_env_runner(
        lambda runner: os.getpid(), local_env_runner=False
    )
    kill_between(algo, "_choose_replayed", pids)  # the rollout is under way then
    results = [algo.train(), algo.train()]
    for result in results:
        assert result["env_runners"]["num_prompts"] == 8
        # The restarted one samples with the learners' weights, not the first ones.
        learner = result["learners"]["default_policy"]
        assert learner["rollout_logp_diff_max"] < 1e-4
    assert pids != algo.env_runner_group.foreach_env_runner(
        lambda runner: os.getpid(), local_env_runner=False
    )
    algo.stop()


@pytest.mark.slow
@pytest.mark.parametrize("num_learners", [1, 2])
def test_a_killed_learner_ends_the_step(ray_session, num_learners):
    algo = small_config(1, num_learners, zero_stage=1).build_algo()
    algo.train()
    pids = algo.learner_group.foreach_learner(lambda learner: os.getpid())
    pids = [result.get() for result in pids.result_or_errors]
    kill_between(algo, "_mini_batches", pids[-1:])
    with pytest.raises(Exception, match=r"(?i)actor.*died|connection"):
        algo.train()
    algo.stop()


@pytest.mark.slow
def test_an_environment_that_breaks_in_a_runner_surfaces(ray_session):
    algo = echo_config(broken=True).env_runners(num_env_runners=1).build_algo()
    with pytest.raises(RuntimeError, match="KeyError: 'no such key'"):
        algo.train()
    algo.stop()


class FullDisk(ExGRPO):
    """Runs out of disk in the middle of its second checkpoint."""

    def save_checkpoint(self, checkpoint_dir):
        if self.iteration < 3:
            return super().save_checkpoint(checkpoint_dir)
        Path(checkpoint_dir, "half").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint(ray_session, tmp_path):
    result = tune.Tuner(
        FullDisk,
        param_space=small_config(),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            name="run",
            stop={"training_iteration": 4},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=2),
            verbose=0,
        ),
    ).fit()[0]
    assert "No space left on device" in str(result.error)
    checkpoint, _ = latest_complete(Path(result.path))
    assert iteration_of(checkpoint) == 2
    algo = ExGRPO.from_checkpoint(str(checkpoint))
    assert algo.train()["training_iteration"] == 3
    algo.stop()


# --- whole runs


FILE = """
from test_training import small_config

config = small_config()
stop = {"training_iteration": 6}
"""
FREQ = ["--checkpoint-freq", "2"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.py").write_text(FILE)
    return tmp_path


def start(folder, *arguments):
    tests = Path(__file__).resolve().parent
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", "rllib_exgrpo.cli", "train", *arguments],
        cwd=folder,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def steps(run):
    file = run / "trial" / "result.json"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line)["training_iteration"] for line in lines]


def wait_for_step(process, run, step):
    while process.poll() is None and (not steps(run) or steps(run)[-1] < step):
        time.sleep(0.1)


def final_weights(run):
    algo = ExGRPO.from_checkpoint(str(latest_complete(run / "trial")[0]))
    weights = weights_of(algo)
    algo.stop()
    return weights


@pytest.mark.slow
def test_a_killed_moved_run_ends_as_if_nothing_had_happened(folder, ray_session):
    assert start(folder, "file", "run.py", "--name", "calm", *FREQ).wait(300) == 0
    run = folder / "results" / "run"
    process = start(folder, "file", "run.py", *FREQ)
    wait_for_step(process, run, 5)
    process.kill()
    process.wait()
    # As if the kill had come before the last file of the second checkpoint.
    checkpoint, _ = latest_complete(run / "trial")
    assert iteration_of(checkpoint) == 4
    (checkpoint / "complete.json").unlink()
    shutil.move(run, folder / "moved")
    process = start(folder, "--resume", "moved")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "checkpoint_000001: it was not written to its end" in output
    assert "Going on after step 2" in output
    assert steps(folder / "moved") == [1, 2, 3, 4, 5, 6]
    calm = final_weights(folder / "results" / "calm")
    for name, weight in final_weights(folder / "moved").items():
        np.testing.assert_array_equal(weight, calm[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_a_run_with_a_checkpoint(folder, number, code):
    process = start(folder, "file", "run.py", "--stop", '{"training_iteration": 100}')
    run = folder / "results" / "run"
    wait_for_step(process, run, 3)
    # To the whole process group, as a terminal and `timeout` send it: Ray stays.
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code
    # That the training prompts are evaluated is all there is to complain of.
    assert errors.startswith("6 of 6 questions of the evaluation set 'easy' are")
    assert len(errors.splitlines()) == 1
    checkpoint, _ = latest_complete(run / "trial")
    last = steps(run)[-1]
    assert iteration_of(checkpoint) == last
    assert f"Ended by {number.name}. `rllib train --resume" in output
    assert f"goes on from step {last}." in output
