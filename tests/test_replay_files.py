import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from replay_helpers import contents, group

from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.files import ReplayFiles
from rllib_exgrpo.replay.folder import MANIFEST, SCHEMAS, Folder, ReplayFileError
from rllib_exgrpo.replay.ids import decode_id, encode_id, encode_ids

IDS = [*range(40), "text", 'quo"te\n', ("pair", 1), b"\x00\xff", None]


def filled(**knobs):
    buffer = ReplayBuffer(group_size=4, seed=5, **knobs)
    buffer.record(
        [group(p, 1 + i % 3, source="ab"[i % 2]) for i, p in enumerate(IDS)], 1
    )
    buffer.record([group(0, 4), group(1, 0), group("new", 4)], 2)
    buffer.choose(draws := buffer.draw(6, 3), [np.arange(len(d.rows)) for d in draws])
    return buffer


def loaded(path, **knobs):
    buffer = ReplayBuffer(group_size=4, **knobs)
    ReplayFiles().load(buffer, Folder.at(path))
    return buffer


def names(path, kind=""):
    return {p.name for p in path.iterdir() if p.name.startswith(kind)}


def test_a_saved_buffer_comes_back_whole(tmp_path):
    buffer = filled()
    ReplayFiles().save(buffer, Folder.at(tmp_path))
    twin = loaded(tmp_path)
    assert contents(twin, [*IDS, "new"]) == contents(buffer, [*IDS, "new"])
    assert twin.get_metrics() == buffer.get_metrics()
    for _ in range(5):  # the generator and the order in the buckets too
        draws = buffer.draw(8, 4), twin.draw(8, 4)
        assert [d.prompt_id for d in draws[0]] == [d.prompt_id for d in draws[1]]
    for field in ("times_replayed", "entropy", "scored_version"):
        for p in IDS[2:]:
            values = [
                b.store.table[field][b.rows_of(p)].tolist() for b in (buffer, twin)
            ]
            np.testing.assert_array_equal(*values)


def test_types_of_prompt_ids_survive(tmp_path):
    ReplayFiles().save(filled(), Folder.at(tmp_path))
    ids = {loaded(tmp_path).prompts.id(row) for row in range(len(IDS) + 1)}
    assert {(type(p), p) for p in ids} == {(type(p), p) for p in [*IDS, "new"]}


scalars = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
ids = st.recursive(scalars, lambda part: st.lists(part, max_size=3).map(tuple))


@given(ids | st.frozensets(scalars, max_size=3))
def test_ids_survive_as_text(prompt_id):
    back = decode_id(encode_id(prompt_id))
    assert (type(back), back) == (type(prompt_id), prompt_id)


@given(st.lists(st.integers() | st.none() | st.booleans()) | st.lists(ids, max_size=5))
@example([1, True])
@example([2**63])
@example([np.int64(3), 4, -5])
def test_many_ids_are_written_as_each_of_them_is(prompt_ids):
    assert encode_ids(prompt_ids).to_pylist() == [encode_id(p) for p in prompt_ids]


def test_an_id_that_is_not_plain_data_is_refused_by_name():
    with pytest.raises(TypeError, match=r"prompt id <object .* of type object"):
        encode_id(object())


def test_files_have_the_documented_schema_and_no_pickle(tmp_path):
    ReplayFiles().save(filled(), Folder.at(tmp_path))
    for kind, schema in SCHEMAS.items():
        (name,) = names(tmp_path, kind)
        assert pq.read_schema(tmp_path / name).equals(schema)
    assert all(name.endswith((".parquet", ".json")) for name in names(tmp_path))
    (name,) = names(tmp_path, "completions")
    first = pq.read_table(tmp_path / name).slice(0, 1).to_pylist()[0]
    assert first["prompt_id"] == "1"  # 0 retired
    assert first["source"] == "b"
    assert first["token_ids"] == b"\x01\0\0\0"
    assert first["behavior_logp"] == np.float32(-0.125).tobytes()


def test_a_second_save_writes_only_what_changed(tmp_path):
    buffer, files = ReplayBuffer(group_size=4, seed=0), ReplayFiles()
    buffer.record([group(i, 3) for i in range(5000)], 1)
    first = files.save(buffer, Folder.at(tmp_path / "a"))
    buffer.record([group(i, 2, first=9) for i in range(10)], 2)
    before = names(tmp_path / "a")
    second = files.save(buffer, Folder.at(tmp_path / "a"))
    assert second < first / 10
    assert before - {MANIFEST} < names(tmp_path / "a")
    assert contents(loaded(tmp_path / "a"), range(20)) == contents(buffer, range(20))


def test_a_save_elsewhere_shares_the_files_that_did_not_change(tmp_path):
    buffer, files = filled(), ReplayFiles()
    files.save(buffer, Folder.at(tmp_path / "a"))
    buffer.record([group("later", 2)], 3)
    files.save(buffer, Folder.at(tmp_path / "b"))
    (name,) = names(tmp_path / "a", "completions")
    assert (tmp_path / "b" / name).samefile(tmp_path / "a" / name)
    everything = [*IDS, "new", "later"]
    assert contents(loaded(tmp_path / "b"), everything) == contents(buffer, everything)
    assert loaded(tmp_path / "a").bucket("later") is None


def test_a_lost_earlier_folder_means_a_full_save(tmp_path):
    buffer, files = filled(), ReplayFiles()
    files.save(buffer, Folder.at(tmp_path / "a"))
    for file in (tmp_path / "a").iterdir():
        file.unlink()
    files.save(buffer, Folder.at(tmp_path / "b"))
    assert contents(loaded(tmp_path / "b"), IDS) == contents(buffer, IDS)


def test_many_saves_leave_few_files(tmp_path):
    buffer, files = ReplayBuffer(group_size=4, seed=0), ReplayFiles()
    for step in range(100):
        buffer.record([group((step, i), 3) for i in range(4)], step)
        files.save(buffer, Folder.at(tmp_path))
    assert len(names(tmp_path, "completions")) <= 9  # sizes double: log2(100) + 2
    assert len(names(tmp_path)) < 50
    assert loaded(tmp_path).num_completions == 1200


def test_files_that_are_mostly_dead_are_written_anew(tmp_path):
    buffer, files = ReplayBuffer(group_size=4, seed=0), ReplayFiles()
    buffer.record([group(i, 3) for i in range(100)], 1)
    files.save(buffer, Folder.at(tmp_path))
    buffer.record([group(i, 4) for i in range(60)], 2)
    files.save(buffer, Folder.at(tmp_path))
    (name,) = names(tmp_path, "completions")
    assert pq.read_metadata(tmp_path / name).num_rows == 120
    assert contents(loaded(tmp_path), range(100)) == contents(buffer, range(100))


def test_a_prompt_that_left_and_came_back_stays(tmp_path):
    buffer, files = ReplayBuffer(group_size=4, seed=0, max_age=1), ReplayFiles()
    buffer.record([group(i, 2, version=9) for i in range(60)], 1)
    buffer.record([group("x", 2, version=0)], 1)
    files.save(buffer, Folder.at(tmp_path))
    buffer.draw(1, 9)  # "x" is too old and leaves
    buffer.record([group("x", 3, version=9)], 2)
    for _ in range(3):
        files.save(buffer, Folder.at(tmp_path))
        assert loaded(tmp_path).bucket("x") == 3
        buffer.record([group(0, 2, version=9)], 3)


def test_a_usage_log_that_starts_anew_still_tells_the_dead(tmp_path):
    buffer, files = ReplayBuffer(group_size=4, seed=0), ReplayFiles()
    buffer.record([group(i, 3) for i in range(40)], 1)
    files.save(buffer, Folder.at(tmp_path))
    buffer.record([group(0, 4)], 2)
    for _ in range(4):
        files.save(buffer, Folder.at(tmp_path))
        draws = buffer.draw(20, 3)
        buffer.choose(draws, [np.arange(len(d.rows)) for d in draws])
    (name,) = names(tmp_path, "completions")
    assert pq.read_metadata(tmp_path / name).num_rows == 120  # the dead are in there
    assert contents(loaded(tmp_path), range(40)) == contents(buffer, range(40))


def test_an_interrupted_save_leaves_the_former_one(tmp_path, monkeypatch):
    buffer, files = filled(), ReplayFiles()
    files.save(buffer, Folder.at(tmp_path))
    before = contents(buffer, IDS)
    buffer.record([group(i, 4) for i in range(2, 20)], 4)
    write = Folder.write

    def fail_at_the_manifest(self, name, fill):
        if name == MANIFEST:
            raise OSError("disk full")
        return write(self, name, fill)

    monkeypatch.setattr(Folder, "write", fail_at_the_manifest)
    with pytest.raises(OSError, match="disk full"):
        files.save(buffer, Folder.at(tmp_path))
    assert contents(loaded(tmp_path), IDS) == before
    monkeypatch.undo()
    files.save(buffer, Folder.at(tmp_path))
    assert contents(loaded(tmp_path), IDS) == contents(buffer, IDS)


def test_a_buffer_with_replaced_contents_is_saved_in_full(tmp_path):
    buffer, files = filled(), ReplayFiles()
    files.save(buffer, Folder.at(tmp_path))
    other = ReplayBuffer(group_size=4)
    other.record([group("other", 2)], 1)
    buffer.set_state(other.get_state())
    files.save(buffer, Folder.at(tmp_path))
    assert len(loaded(tmp_path)) == 1
    assert loaded(tmp_path).bucket("other") == 2


def test_an_empty_buffer_is_saved_too(tmp_path):
    ReplayFiles().save(ReplayBuffer(group_size=4), Folder.at(tmp_path))
    assert len(loaded(tmp_path)) == 0


def test_on_another_file_system(tmp_path):
    remote = pa.fs.SubTreeFileSystem(str(tmp_path), pa.fs.LocalFileSystem())
    buffer, files = filled(), ReplayFiles()
    for path in ("a", "b", "a"):
        buffer.record([group(path, 2)], 3)
        files.save(buffer, Folder.at(path, remote))
    assert contents(loaded(tmp_path / "a"), IDS) == contents(buffer, IDS)


@pytest.mark.parametrize("kind", ["completions", "usage", "prompts"])
def test_a_truncated_file_is_named(tmp_path, kind):
    ReplayFiles().save(filled(), Folder.at(tmp_path))
    (name,) = names(tmp_path, kind)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ReplayFileError, match=re.escape(str(path))):
        loaded(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    ReplayFiles().save(filled(), Folder.at(tmp_path))
    (name,) = names(tmp_path, "prompts")
    (tmp_path / name).unlink()
    with pytest.raises(ReplayFileError, match=re.escape(str(tmp_path / name))):
        loaded(tmp_path)


def test_a_flipped_byte_is_found_and_the_file_named(tmp_path):
    ReplayFiles().save(filled(), Folder.at(tmp_path))
    (name,) = names(tmp_path, "completions")
    path = tmp_path / name
    damaged = bytearray(path.read_bytes())
    place = damaged.find(np.float32(-0.125).tobytes())
    damaged[place] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ReplayFileError, match=re.escape(str(path))):
        loaded(tmp_path)


def test_a_foreign_parquet_is_named(tmp_path):
    ReplayFiles().save(filled(), Folder.at(tmp_path))
    (name,) = names(tmp_path, "usage")
    pq.write_table(pa.table({"x": [1]}), tmp_path / name)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    manifest["files"]["usage"][0]["bytes"] = (tmp_path / name).stat().st_size
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ReplayFileError, match=re.escape(str(tmp_path / name))):
        loaded(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"format": "x"}', '{"format": "rllib_exgrpo.replay", "version": 1}'],
)
def test_a_foreign_manifest_is_named(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ReplayFileError, match=re.escape(str(tmp_path / MANIFEST))):
        loaded(tmp_path)


def test_a_folder_without_a_manifest_is_named(tmp_path):
    with pytest.raises(ReplayFileError, match=re.escape(str(tmp_path))):
        loaded(tmp_path)


def test_another_tokenizer_is_refused(tmp_path):
    ReplayFiles().save(filled(metadata={"tokenizer": "aaa"}), Folder.at(tmp_path))
    assert len(loaded(tmp_path, metadata={"tokenizer": "aaa"})) == len(filled())
    assert len(loaded(tmp_path)) == len(filled())
    with pytest.raises(ValueError, match="tokenizer 'aaa', but this run's is 'bbb'"):
        loaded(tmp_path, metadata={"tokenizer": "bbb"})


def test_another_group_size_is_refused(tmp_path):
    ReplayFiles().save(filled(), Folder.at(tmp_path))
    with pytest.raises(ValueError, match="`group_size` is 8"):
        ReplayFiles().load(ReplayBuffer(group_size=8), Folder.at(tmp_path))


def test_a_buffer_on_disk_holds_the_same(tmp_path):
    class Small(ReplayBuffer):
        segment_tokens = 8

    buffers = [
        Small(group_size=4, seed=0, max_completions_per_prompt=2, disk_path=path)
        for path in (None, str(tmp_path / "disk"))
    ]
    for step in range(40):
        for buffer in buffers:
            buffer.record(
                [group(i, 1 + (i + step) % 3, first=step) for i in range(5)], 1
            )
    in_memory, on_disk = buffers
    assert contents(on_disk, range(5)) == contents(in_memory, range(5))
    backing = [s.token_ids.flags.owndata for s in on_disk.store.segments.values()]
    assert backing.count(True) <= 1  # the open segment
    assert list((tmp_path / "disk").iterdir()) == []  # mapped files have no name
    ReplayFiles().save(on_disk, Folder.at(tmp_path / "saved"))
    again = loaded(tmp_path / "saved", disk_path=str(tmp_path / "disk"))
    assert contents(again, range(5)) == contents(in_memory, range(5))
