"""What went wrong for people while they ran things elsewhere stays out here.

Reports 39 and 44 are in `test_training`, 45 to 47 in `test_faults`, `test_checkpoints`
and `test_replay_files`, 41 in `test_metric_names` and `test_training`, 48 in
`test_tracking` and 49 in `test_config`.
"""

import random
import shutil
import time

import pytest
from ray.tune import Checkpoint
from test_faults import Runners, dispatched, prompts_of
from test_training import small_config

from rllib_exgrpo import ExGRPO, ExGRPOConfig
from rllib_exgrpo import exgrpo_rollout as rollout_module
from rllib_exgrpo.envs import MathEnv, Problem
from rllib_exgrpo.exgrpo_resources import check_room, lacking


# bug reports 40 and 43: experience lost in silence; as many runners as were there
def test_a_checkpoint_loads_with_fewer_runners_and_says_what_it_lacks(
    ray_session, tmp_path, caplog
):
    algo = small_config(env_runners=1).build_algo()
    algo.train()
    stored = algo.replay_buffer.num_completions
    algo.save_to_path(str(tmp_path / "whole"))
    algo.stop()
    assert stored > 0
    shutil.copytree(tmp_path / "whole", tmp_path / "without")
    shutil.rmtree(tmp_path / "without" / "replay_buffer")

    for name, there in (("whole", stored), ("without", 0)):
        caplog.clear()
        path = str(tmp_path / name)
        alone = ExGRPO.from_checkpoint(
            Checkpoint(path) if name == "whole" else path,
            config={"num_env_runners": 0},
        )
        assert alone.env_runner_group.num_remote_env_runners() == 0
        assert alone.iteration == 1
        assert alone.replay_buffer.num_completions == there
        assert caplog.text.count("holds no replay buffer") == (name == "without")
        alone.stop()


# bug report 43: it waits for ever for CPUs
def test_a_run_that_is_too_large_for_the_machine_is_refused(ray_session):
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"needs 50 CPUs and 8 are there\. Lower"):
        small_config(env_runners=50).build_algo()
    assert time.monotonic() - started < 60


def test_what_other_jobs_hold_is_waited_for_with_a_word(ray_session, caplog):
    import ray

    @ray.remote(num_cpus=6)
    class Other:
        def is_there(self):
            return True

    other = Other.remote()
    assert ray.get(other.is_there.remote())
    check_room([{"CPU": 1}] * 3)
    assert "Waiting until other jobs end: The run needs 3 CPUs" in caplog.text
    ray.kill(other)


def test_room_by_hand():
    needs = {"CPU": 3, "GPU": 1.5}
    assert lacking(needs, {"CPU": 3, "GPU": 2}) == ""
    assert "needs 1.5 GPUs and 0 are free. Lower" in lacking(needs, {"CPU": 4}, "free")


# bug report 42: RLlib drops what takes longer than a minute
def test_slow_generation_is_waited_for_by_default(monkeypatch):
    config = ExGRPOConfig()
    runners = Runners(silent=[1, 2])
    clock = 0.0

    def monotonic():
        nonlocal clock
        clock += 10.0  # seconds from one look to the next
        if clock > 900:
            runners.silent.clear()
        return clock

    monkeypatch.setattr(rollout_module.time, "monotonic", monotonic)
    dispatcher = dispatched(runners, timeout_s=config.sample_timeout_s)
    assert prompts_of(dispatcher.collect()) == [10, 11, 12, 13]
    assert clock > 900
    assert config.evaluation_sample_timeout_s is None


# bug report 50: a stack trace for each answer that cannot be read
def test_a_thousand_unreadable_answers_are_counted_and_not_logged(caplog, capfd):
    letters = random.Random(0)
    texts = [
        "".join(letters.choices(r"\{}$^_&%boxed frac 0123=()[]+-", k=300))
        for _ in range(996)
    ] + [r"\boxed{", r"\boxed{\frac{1}", r"$\left($", "\x00\ud800"]
    env = MathEnv(data="unused", verifier_workers=1, verifier_time_limit_s=10.0)
    try:
        verdicts = env.verify_many(texts, [Problem(0, "?", "7")] * 1000)
    finally:
        env.close()
    assert {v.reward for v in verdicts} == {0.0}
    assert sum(v.reason == "no_answer" for v in verdicts) > 500
    assert len(caplog.records) <= 5
    out, err = capfd.readouterr()
    assert len((out + err).splitlines()) <= 5
