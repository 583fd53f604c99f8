"""Sweeps: exact exploits, trials by name and by class, and what the terminal shows."""

import json
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
from ray import tune
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.tune.experiment import Trial
from test_training import small_config, weights_of

from rllib_exgrpo import ExGRPO
from rllib_exgrpo.cli import _callbacks as callbacks
from rllib_exgrpo.cli._callbacks import PendingWatch
from rllib_exgrpo.cli._errors import CommandError
from rllib_exgrpo.cli._experiment import Experiment
from rllib_exgrpo.cli._sweep import _outcomes, _print_table, trial_number


def experiment(**settings):
    config = small_config().training(**settings)
    return Experiment("sweep", config, {"training_iteration": 1})


def test_what_is_searched_is_found_however_deep():
    varied = experiment(
        lr=tune.loguniform(1e-6, 1e-4),
        replay_buffer_config={"sigma": tune.grid_search([0.1, 0.2])},
    )
    assert varied.searched == ["lr", "replay_buffer_config/sigma"]
    assert [v.replay_buffer_config["sigma"] for v in varied.variants()] == [0.1, 0.2]
    assert experiment().searched == []


def test_a_bad_point_of_a_grid_is_refused_before_the_first_trial():
    varied = experiment(replay_ratio=tune.grid_search([0.5, 1.5]))
    with pytest.raises(CommandError, match=r"`replay_ratio` is 1.5"):
        varied.checked()


def test_room_is_looked_for_at_the_largest_point_of_a_grid():
    grid = tune.grid_search([1, 5, 0])
    config = small_config().env_runners(num_env_runners=grid)
    largest = Experiment("sweep", config, {"training_iteration": 1}).largest()
    assert largest.num_env_runners == 5


def test_the_table_has_the_best_trial_first(tmp_path, capsys):
    for trial, rate in (("0", 0.5), ("1", 0.75), ("2", None)):
        (tmp_path / f"trial_{trial}").mkdir()
        results = [{"training_iteration": 1, "config": {"lr": 1e-5}}]
        if rate is not None:
            results[0]["evaluation"] = {"pass_at_1": rate, "pass_at_1_stderr": 0.02}
            # The last step was not evaluated.
            results.append({"training_iteration": 2, "config": {"lr": 1e-5}})
        text = "".join(json.dumps(r) + "\n" for r in results)
        (tmp_path / f"trial_{trial}" / "result.json").write_text(text)
    _print_table(tmp_path, _outcomes(tmp_path, ["lr"]))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in rows if row and row[0].isdigit()]
    assert rows == [
        ["1", "2", "75.0", "±", "2.0", "lr=1e-05"],
        ["0", "2", "50.0", "±", "2.0", "lr=1e-05"],
        ["2", "1", "?", "lr=1e-05"],
    ]


def test_trials_are_numbered():
    numbers = [trial_number(SimpleNamespace(trial_id=f"ab_{n:05}")) for n in (0, 12)]
    assert numbers == ["0", "12"]


def placement_groups(*states):
    return {i: {"state": s, "bundles": {0: {"CPU": 3}}} for i, s in enumerate(states)}


@pytest.mark.parametrize(
    ("states", "waits"),
    [
        (["PENDING"], True),
        (["CREATED"], False),  # it starts its engines
        (["CREATED", "PENDING"], False),  # one after the other, as it should be
        ([], False),
    ],
)
def test_a_long_wait_for_room_is_told_once_a_minute(monkeypatch, capsys, states, waits):
    clock = iter([0.0, 29.0, 31.0, 60.0, 92.0])
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=clock.__next__))
    groups = placement_groups("CREATED")
    monkeypatch.setattr(callbacks, "placement_group_table", lambda: groups)
    monkeypatch.setattr(callbacks.ray, "available_resources", lambda: {"CPU": 1.0})
    needs = SimpleNamespace(required_resources={"CPU": 3.0}, bundles=[{"CPU": 3}])
    trial = SimpleNamespace(status=Trial.PENDING, placement_group_factory=needs)
    watch = PendingWatch(print)
    watch.setup()  # that group is another run's
    own = {f"own {i}": group for i, group in placement_groups(*states).items()}
    groups |= own
    told = []
    for i in range(5):
        watch.on_step_end(i, [trial])
        told.append("needs 3 CPUs (1 free)" in capsys.readouterr().out)
    assert told == [False, False, waits, False, waits]


def test_an_exploit_takes_all_of_the_other_but_its_learning_rate(ray_session, tmp_path):
    donor = small_config().build_algo()
    donor.train()
    donor.save_to_path(str(tmp_path / "donor"))
    weights = weights_of(donor)
    stored = donor.replay_buffer.num_completions
    moments = optimizer_of(donor)
    donor.stop()

    config = small_config().training(lr=3e-5, replay_ratio=0.25).debugging(seed=8)
    trial = config.build_algo()
    trial.train()
    trial.restore_from_path(str(tmp_path / "donor"))
    for name, weight in weights_of(trial).items():
        np.testing.assert_array_equal(weight, weights[name])
    assert trial.replay_buffer.num_completions == stored
    for own, other in zip(optimizer_of(trial), moments, strict=True):
        np.testing.assert_array_equal(own, other)
    result = trial.train()
    rate = result["learners"][DEFAULT_MODULE_ID]["default_optimizer_learning_rate"]
    assert rate == pytest.approx(3e-5)
    assert result["training_iteration"] == 2
    # A quarter of 8 prompts.
    assert result["replay"]["num_prompts_replayed"] <= 2
    trial.stop()


def optimizer_of(algo):
    state = algo.learner_group._learner.engine.optimizer.state_dict()["state"]
    return [np.array(s[k]) for s in state.values() for k in ("exp_avg", "exp_avg_sq")]


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["ExGRPO", ExGRPO])
def test_a_tuner_takes_it_by_name_and_by_class(ray_session, tmp_path, trainable):
    grid = tune.Tuner(
        trainable,
        param_space=small_config().training(lr=tune.grid_search([1e-5, 1e-4])),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            name="run",
            stop={"training_iteration": 1},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            verbose=0,
        ),
    ).fit()
    assert not grid.errors
    assert sorted(r.config["lr"] for r in grid) == [1e-5, 1e-4]
    os.rename(tmp_path / "run", tmp_path / "moved")
    again = tune.Tuner.restore(str(tmp_path / "moved"), trainable=trainable).fit()
    assert [r.metrics["training_iteration"] for r in again] == [1, 1]


@pytest.mark.slow
def test_a_trial_without_room_says_so(ray_session, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(callbacks, "_WAIT_S", 2.0)
    started = time.monotonic()

    class Enough(tune.Stopper):
        def __call__(self, trial_id, result):
            return False

        def stop_all(self):
            return time.monotonic() - started > 8

    tune.Tuner(
        ExGRPO,
        param_space=small_config(env_runners=50),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            stop=Enough(),
            callbacks=[PendingWatch(print)],
            verbose=0,
        ),
    ).fit()
    assert "a trial needs 51 CPUs (8 free)" in capsys.readouterr().out
