"""Learning curves: the points, the start of replay, Tune's file, the picture."""

import json
import math

import numpy as np
import pytest

from rllib_exgrpo.learning_curve import LearningCurve, read_results, save_plot


def result(lifetime, replayed=0, pass_at_1=None, at_start=None):
    made = {
        "env_runners": {"num_env_steps_sampled_lifetime": lifetime},
        "replay": {"num_prompts_replayed": replayed},
    }
    if pass_at_1 is not None:
        made["evaluation"] = {
            "pass_at_1": pass_at_1,
            "pass_at_1_low": pass_at_1 - 0.02,
            "pass_at_1_high": pass_at_1 + 0.02,
            "amc": {"pass_at_1": 0.1},
        }
    if at_start is not None:
        made["evaluation_at_start"] = {"pass_at_1": at_start}
    return made


RESULTS = [
    result(256, at_start=0.3),
    result(512, pass_at_1=0.4),
    result(752, replayed=16),
    result(992, replayed=16, pass_at_1=0.5),
]


def test_points_of_a_run():
    curve = LearningCurve.from_results(RESULTS, "run")
    np.testing.assert_array_equal(curve.completions, [0, 512, 992])
    np.testing.assert_array_equal(curve.pass_at_1, [0.3, 0.4, 0.5])
    np.testing.assert_allclose(curve.low, [math.nan, 0.38, 0.48])
    np.testing.assert_allclose(curve.high, [math.nan, 0.42, 0.52])


def test_points_of_a_named_evaluation_set():
    curve = LearningCurve.from_results(RESULTS, "run", "amc")
    np.testing.assert_array_equal(curve.completions, [512, 992])
    np.testing.assert_array_equal(curve.pass_at_1, [0.1, 0.1])
    with pytest.raises(ValueError, match="no evaluation"):
        LearningCurve.from_results(RESULTS, "run", "aime")


def test_replay_starts_where_the_first_replaying_step_begins():
    assert LearningCurve.from_results(RESULTS, "run").replay_start == 512


def test_replay_that_starts_at_once_or_never():
    at_once = [result(240, replayed=16, pass_at_1=0.1)]
    assert LearningCurve.from_results(at_once, "run").replay_start == 0
    assert LearningCurve.from_results(RESULTS[:2], "run").replay_start is None


def test_a_run_without_evaluation_is_refused():
    with pytest.raises(ValueError, match="evaluation_interval"):
        LearningCurve.from_results([result(256)], "run")


def test_results_file_with_nan_and_an_unfinished_line(tmp_path):
    lines = [
        json.dumps({"training_iteration": 1, "x": math.nan}),
        json.dumps({"training_iteration": 2, "x": 1}),
        json.dumps({"training_iteration": 2, "x": 2}),  # made again after a resume
    ]
    file = tmp_path / "trial" / "result.json"
    file.parent.mkdir()
    file.write_text("\n".join(lines) + '\n{"x":')
    results = read_results(tmp_path)
    assert math.isnan(results[0]["x"])
    assert [r["x"] for r in results[1:]] == [2]
    assert read_results(file)[1:] == results[1:]


def test_a_folder_must_hold_one_run(tmp_path):
    with pytest.raises(ValueError, match="found none"):
        read_results(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text("{}\n")
    with pytest.raises(ValueError, match="exactly one"):
        read_results(tmp_path)


def test_plot_replaces_the_picture_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "curve.png"
    path.write_text("old")
    curves = [LearningCurve.from_results(RESULTS, name) for name in "ab"]
    save_plot(curves, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
