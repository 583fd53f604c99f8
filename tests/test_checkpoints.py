"""Which checkpoints of a run are whole; results cut back to one; nothing half-read."""

import csv
import json

import pytest
from pyarrow.fs import LocalFileSystem

from rllib_exgrpo.checkpoints import (
    MARKER,
    iteration_of,
    last_index,
    latest_complete,
    mark_complete,
)
from rllib_exgrpo.cli import main
from rllib_exgrpo.cli._callbacks import append_row, rewind
from rllib_exgrpo.cli._resume import find_resume_point, how_to_resume, write_record

LOCAL = LocalFileSystem()


def saved(trial, number, iteration):
    path = trial / f"checkpoint_{number:06}"
    path.mkdir(parents=True)
    (path / "weights").write_text("w")
    if iteration is not None:
        mark_complete(str(path), LOCAL, iteration)
    return path


def test_a_checkpoint_that_was_cut_short_is_never_the_latest(tmp_path):
    whole = saved(tmp_path, 0, 10)
    without_marker = saved(tmp_path, 1, None)
    half_a_marker = saved(tmp_path, 2, 30)
    (half_a_marker / MARKER).write_text('{"training_it')
    assert latest_complete(tmp_path) == (whole, [half_a_marker, without_marker])
    assert [iteration_of(p) for p in (whole, without_marker, half_a_marker)] == [
        10,
        None,
        None,
    ]


def test_numbers_go_on_after_the_highest_whole_or_not(tmp_path):
    trial = tmp_path / "trial"
    assert last_index(str(trial), LOCAL) == -1
    saved(trial, 9, 1)
    saved(trial, 10, None)
    (trial / "checkpoint_best").mkdir()  # of another's making
    assert last_index(str(trial), LOCAL) == 10


def test_results_are_cut_back_to_the_checkpoint(tmp_path):
    trial = tmp_path / "trial"
    saved(trial, 0, 2)
    for i in (1, 2, 3):
        result = {"training_iteration": i, "a": {"b": 10 * i}, "config": {"x": 1}}
        with (trial / "result.json").open("a") as file:
            file.write(json.dumps(result) + "\n")
        append_row(trial / "progress.csv", result)
    with (trial / "result.json").open("a") as file:
        file.write('{"training_iterat')  # the kill came in the middle of a line
    point = find_resume_point(tmp_path)
    assert [r["training_iteration"] for r in point.results] == [1, 2]
    lines = (trial / "result.json").read_text().splitlines()
    assert [json.loads(line)["training_iteration"] for line in lines] == [1, 2]
    with (trial / "progress.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"training_iteration": "1", "a/b": "10"},
            {"training_iteration": "2", "a/b": "20"},
        ]


def test_a_table_keeps_the_columns_of_its_first_row(tmp_path):
    table = tmp_path / "progress.csv"
    append_row(table, {"x": 1, "at_start": 5})
    append_row(table, {"y": 7, "x": 2})  # a resumed run has no start
    assert table.read_text().splitlines() == ["x,at_start", "1,5", "2,"]


def test_cutting_back_to_the_start_leaves_nothing(tmp_path):
    (tmp_path / "result.json").write_text('{"training_iteration": 1}\n')
    assert rewind(tmp_path, 0) == []
    assert (tmp_path / "result.json").read_text() == ""


def test_a_run_without_a_whole_checkpoint_has_no_resume_point(tmp_path):
    saved(tmp_path / "trial", 0, None)
    assert find_resume_point(tmp_path) is None
    assert "no checkpoint" in how_to_resume(tmp_path)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda run: None, "no readable run.json"),
        (lambda run: write_record(run, {"name": "x", "stop": {}}), "no whole"),
        (
            lambda run: (
                write_record(run, {"name": "x", "stop": {}}),
                (run / "trial_0").mkdir(),
            ),
            "is a sweep",
        ),
    ],
)
def test_what_cannot_be_resumed_is_told(tmp_path, capsys, prepare, words):
    prepare(tmp_path)
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
