"""Tables: every source gives the same problems, in memory and on disk."""

import json
import pickle
import sys

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_exgrpo.envs import TableEnv, UnknownPromptError

ROWS = [{"prompt": f"What is {k}?", "answer": str(k), "n": k % 3} for k in range(10)]


class PlainEnv(TableEnv):
    """Wants the gold answer, nothing else."""

    def verify(self, completion, problem):
        return float(completion == str(problem.answer))


def write_arrow(table, path, new=pa.ipc.new_file):
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


WRITERS = {
    "rows.parquet": lambda table, path: pq.write_table(table, path, row_group_size=3),
    "rows.arrow": write_arrow,
    "rows.feather": lambda t, path: write_arrow(t, path, pa.ipc.new_stream),
    "rows.csv": pyarrow.csv.write_csv,
    "rows.jsonl": lambda table, path: path.write_text(
        "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    ),
}


@pytest.fixture
def write(tmp_path):
    def write(name="rows.parquet", rows=ROWS):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        WRITERS[f"rows{path.suffix}"](pa.Table.from_pylist(rows), path)
        return path

    return write


@pytest.fixture
def make(tmp_path):
    return lambda data, **knobs: PlainEnv(data=data, cache_dir=tmp_path / "c", **knobs)


@pytest.fixture
def on_disk(make):
    return lambda data, **knobs: make(data, max_rows_in_memory=0, **knobs)


def problems(env):
    return [(p.prompt, str(p.answer)) for p in map(env.problem, env.prompt_ids)]


EXPECTED = [(row["prompt"], row["answer"]) for row in ROWS]


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_problems(write, make, on_disk, name):
    path = write(name)
    assert problems(make(path)) == EXPECTED
    assert problems(on_disk(path)) == EXPECTED
    assert list(on_disk(path).prompt_ids) == list(range(10))


def test_folders_patterns_and_lists_are_read_in_order(write, make, on_disk, tmp_path):
    write("part/b.parquet", ROWS[6:])
    write("part/a.parquet", ROWS[:6])
    for data in (
        tmp_path / "part",
        f"{tmp_path}/part/*.parquet",
        [tmp_path / "part/a.parquet", tmp_path / "part/b.parquet"],
    ):
        assert problems(make(data)) == problems(on_disk(data)) == EXPECTED
    with pytest.raises(FileNotFoundError, match="no file of rows.*'hf:NAME'"):
        _ = make(f"{tmp_path}/part/*.csv").prompt_ids


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    return datasets


def test_folders_that_datasets_saved(datasets, make, on_disk, tmp_path):
    train = datasets.Dataset.from_list(ROWS)
    train.save_to_disk(tmp_path / "one")
    both = {"train": train, "test": datasets.Dataset.from_list(ROWS[:2])}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "two")
    assert problems(make(tmp_path / "one")) == EXPECTED
    assert problems(on_disk(tmp_path / "two", split="train")) == EXPECTED
    assert problems(make(tmp_path / "two", split="test")) == EXPECTED[:2]
    with pytest.raises(ValueError, match=r"has the splits \['train', 'test'\]"):
        _ = make(tmp_path / "two").prompt_ids


def test_data_sets_by_name_are_memory_mapped(datasets, write, make, on_disk):
    folder = write("named/train.parquet").parent  # a folder is a name for `datasets`
    assert problems(on_disk(f"hf:{folder}", split="train")) == EXPECTED
    with pytest.raises(FileNotFoundError, match="cannot be loaded.*`save_to_disk`"):
        _ = make("hf:no/such-data", split="train").prompt_ids


def test_data_sets_by_name_need_the_extra(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes the import fail
    with pytest.raises(ImportError, match=r"pip install 'rllib_exgrpo\[datasets\]'"):
        _ = make("hf:openai/gsm8k").prompt_ids


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    group=st.integers(1, 5),
    limit=st.none() | st.integers(1, 12),
)
def test_rows_on_disk_equal_rows_in_memory(tmp_path_factory, sizes, group, limit):
    folder = tmp_path_factory.mktemp("rows")
    for number, size in enumerate(sizes):
        rows = [{"prompt": f"{number} {k}", "answer": k % 2} for k in range(size)]
        schema = pa.schema([("prompt", pa.string()), ("answer", pa.int64())])
        table = pa.Table.from_pylist(rows, schema)
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group)
    knobs = {"data": folder, "limit": limit, "cache_dir": folder / "cache"}
    if not sum(sizes):
        with pytest.raises(ValueError, match="gave no problem"):
            _ = PlainEnv(knobs).prompt_ids
        return
    env = PlainEnv(knobs, max_rows_in_memory=0)
    assert problems(env) == problems(PlainEnv(knobs))
    assert [t for a in env.question_texts() for t in a.to_pylist()] == [
        question for question, _ in problems(env)
    ]


def test_splits_and_limits_on_disk(write, on_disk):
    env = on_disk(write(), split_column="n", split=1, limit=2)
    assert list(env.prompt_ids) == [1, 4]  # rows whose n is 1: 1, 4, 7
    assert env.problem(4).answer == "4"
    for missing in (2, 7, 99, "4"):
        with pytest.raises(UnknownPromptError):
            env.problem(missing)


def test_a_table_on_disk_survives_pickling(write, on_disk):
    env = on_disk(write())
    assert env.problem(3).answer == "3"
    assert problems(pickle.loads(pickle.dumps(env))) == EXPECTED


def test_decoded_row_groups_are_shared_and_renewed(write, on_disk, tmp_path):
    on_disk(write()).problem(0)
    on_disk(write()).problem(1)
    decoded = list((tmp_path / "c").iterdir())
    write(rows=[{**row, "answer": "new"} for row in ROWS])
    assert on_disk(tmp_path / "rows.parquet").problem(0).answer == "new"
    assert set(decoded) < set((tmp_path / "c").iterdir())


def test_ids_from_a_column(write, make, on_disk):
    rows = [{**row, "id": f"q{k}"} for k, row in enumerate(ROWS)]
    path = write(rows=rows)
    for env in (make(path, id_column="id"), on_disk(path, id_column="id")):
        assert list(env.prompt_ids) == [row["id"] for row in rows]
        assert (env.problem("q7").prompt_id, env.problem("q7").answer) == ("q7", "7")
        for missing in ("q10", 7):
            with pytest.raises(UnknownPromptError):
                env.problem(missing)


BAD = [{**row, "prompt": None if k in (2, 8) else row["prompt"]} for k, row in
       enumerate(ROWS)]  # fmt: skip


def test_bad_rows_of_a_large_table_are_found_at_start(write, on_disk):
    with pytest.raises(ValueError, match=r"count from 0.*no question: 2 \(rows 2, 8\)"):
        _ = on_disk(write(rows=BAD), check_rows=None).prompt_ids


def test_bad_rows_beyond_the_checked_ones_are_found_when_drawn(write, on_disk):
    # Four row groups: their first rows are 0, 3, 6 and 9.
    env = on_disk(write(rows=BAD), check_rows=4)
    assert env.problem(3).answer == "3"
    with pytest.raises(ValueError, match=r"row 8 of .*count from 0\): no question"):
        env.problem(8)
    env = on_disk(write(rows=BAD), check_rows=4, on_bad_rows="drop")
    with pytest.raises(UnknownPromptError, match="row 8 of .* is left out"):
        env.problem(8)


def test_unreadable_files_are_named(write, make, tmp_path):
    for name in ("rows.parquet", "rows.arrow", "rows.jsonl"):
        (tmp_path / name).write_bytes(b"{no table}")
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            _ = make(tmp_path / name).prompt_ids
