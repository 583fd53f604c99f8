"""Weights & Biases, in offline mode: what it is given, and that it holds up nothing."""

import json
import logging
import struct
import time
from types import SimpleNamespace

import pytest
import wandb

from rllib_exgrpo.evaluation.examples import Example, write_examples
from rllib_exgrpo.exgrpo_wandb import WandbTracker
from rllib_exgrpo.replay.folder import Folder


class Trial(SimpleNamespace):
    """What the tracker sees of a trial of Tune's."""

    def __str__(self):
        return "my_run"


@pytest.fixture
def trial(tmp_path):
    config = {"lr": 1e-4, "env": Trial, "nested": {"mu": 0.5}}
    return Trial(trial_id="a_00000", path=str(tmp_path / "trial"), config=config)


def result(i, **parts):
    return {"training_iteration": i, "env_runners": {"pass_rate": i / 100}, **parts}


def track(trial, results):
    """Logs results as one process does, from start to end."""
    tracker = WandbTracker("project", group="sweep", tags=["drill"])
    tracker.log_trial_start(trial)
    for r in results:
        tracker.log_trial_result(r["training_iteration"], trial, r)
    tracker.log_trial_end(trial)


def sessions(trial):
    """Reads the files of the trial's sessions, as `wandb sync` does, oldest first."""
    folders = sorted((trial.folder / "wandb").glob("offline-run-*"))
    return [whole_session(next(folder.glob("*.wandb"))) for folder in folders]


def whole_session(file):
    """Waits for W&B's own process, which may still be writing after the end."""
    for _ in range(600):
        session = list(records(file))
        if any(record.HasField("exit") for record in session):
            return session
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end.")


def records(file):
    """Yields the records of a file in LevelDB's log format, after W&B's own header."""
    from wandb.proto import wandb_internal_pb2 as protocol

    data, at, payload = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left_in_block = 2**15 - at % 2**15
        if left_in_block < 7:
            at += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        payload += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = protocol.Record()
            record.ParseFromString(payload)
            yield record
            payload = b""


def history(session):
    rows = [r.history.item for r in session if r.WhichOneof("record_type") == "history"]
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row}
        for row in rows
    ]


@pytest.fixture
def offline(monkeypatch, trial, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    trial.folder = tmp_path / "trial"


def test_a_resumed_run_logs_steps_again_and_none_is_refused(offline, trial, caplog):
    with caplog.at_level(logging.WARNING):
        track(trial, [result(i) for i in range(1, 11)])
        # The checkpoint was of step 7.
        track(trial, [result(i) for i in (8, 9)])
    first, second = sessions(trial)
    assert [row["training_iteration"] for row in history(first)] == [*range(1, 11)]
    rows = history(second)
    assert [row["training_iteration"] for row in rows] == [8, 9]
    assert [row["env_runners/pass_rate"] for row in rows] == [0.08, 0.09]
    runs = [next(r.run for r in s if r.HasField("run")) for s in (first, second)]
    assert runs[0].run_id == runs[1].run_id
    assert (runs[0].display_name, runs[0].run_group) == ("my_run", "sweep")
    assert list(runs[0].tags) == ["drill"]
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert (config["lr"], config["nested"]) == (1e-4, {"mu": 0.5})
    # Everything is plotted against the training iteration.
    metrics = [r.metric for r in first if r.HasField("metric")]
    assert {m.glob_name: m.step_metric for m in metrics}["*"] == "training_iteration"
    assert caplog.text == ""


def example(iteration, completion):
    numbers = {"num_samples": 2, "num_correct": 1, "num_tokens": 1, "reward": 1.0}
    texts = {"prompt": "3+4", "completion": completion, "reason": "", "source": ""}
    return Example("dev", iteration, "7", **numbers, **texts, truncated=False)


def test_examples_of_an_evaluation_become_a_table(offline, trial):
    folder = Folder.at(trial.folder / "evaluation")
    for iteration in (0, 2, 4):  # the last was written before the run was cut back
        write_examples(folder, iteration, [example(iteration, str(iteration))])
    track(
        trial,
        [result(1, evaluation_at_start={}), result(2, evaluation={}), result(3)],
    )
    rows = [row.get("evaluation_examples/nrows") for row in history(sessions(trial)[0])]
    assert rows == [1, 1, None]
    files = (trial.folder / "wandb").glob("offline-run-*/files/media/table/*.json")
    tables = [json.loads(file.read_text()) for file in files]
    place = tables[0]["columns"].index("completion")
    assert sorted(table["data"][0][place] for table in tables) == ["0", "2"]


def test_without_a_key_the_run_is_kept_offline_with_one_warning(
    monkeypatch, trial, tmp_path, caplog
):
    trial.folder = tmp_path / "trial"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(wandb, "login", lambda prompt: False)
    with caplog.at_level(logging.WARNING):
        track(trial, [result(1)])
    assert [r.message.partition(":")[0] for r in caplog.records] == [
        "Weights & Biases keeps this run offline"
    ]
    assert history(sessions(trial)[0])[0]["training_iteration"] == 1


@pytest.mark.parametrize("mode", ["", "of-line"])
def test_a_mode_that_there_is_not_does_not_fail_training(
    monkeypatch, trial, tmp_path, caplog, mode
):
    trial.folder = tmp_path / "trial"
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setattr(wandb, "login", lambda prompt: False)
    with caplog.at_level(logging.WARNING):
        track(trial, [result(1)])
    assert caplog.text.count("keeps this run offline") == 1
    assert mode in caplog.text
    assert len(history(sessions(trial)[0])) == 1


def test_without_a_network_the_run_is_kept_offline(
    monkeypatch, trial, tmp_path, caplog
):
    trial.folder = tmp_path / "trial"
    init = wandb.init

    def unreachable(mode, **kwargs):
        if mode == "online":
            raise wandb.errors.CommError("no route to host")
        return init(mode=mode, **kwargs)

    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(wandb, "login", lambda prompt: True)
    monkeypatch.setattr(wandb, "init", unreachable)
    with caplog.at_level(logging.WARNING):
        track(trial, [result(1)])
    assert "no route to host" in caplog.text
    assert len(history(sessions(trial)[0])) == 1


def test_disabled_means_disabled(monkeypatch, trial, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    track(trial, [result(1)])
    assert not (tmp_path / "trial" / "wandb").exists()
