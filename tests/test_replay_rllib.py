import pickle

import numpy as np
import pytest
from ray.rllib.utils.checkpoints import Checkpointable
from replay_helpers import contents, group

from rllib_exgrpo.exgrpo_replay import ExGRPOReplayBuffer, ReplayFileError


class Parent(Checkpointable):
    """Holds a buffer as an RLlib algorithm does."""

    def __init__(self, buffer=None):
        self.buffer = buffer or ExGRPOReplayBuffer(group_size=4)
        self.steps = 0

    def get_state(self, components=None, *, not_components=None, **kwargs):
        state = {"steps": self.steps}
        if self._check_component("replay_buffer", components, not_components):
            state["replay_buffer"] = self.buffer.get_state()
        return state

    def set_state(self, state):
        self.steps = state["steps"]
        if "replay_buffer" in state:
            self.buffer.set_state(state["replay_buffer"])

    def get_ctor_args_and_kwargs(self):
        return (), {}

    def get_checkpointable_components(self):
        return [("replay_buffer", self.buffer)]


def filled(num_prompts=30, **knobs):
    buffer = ExGRPOReplayBuffer(group_size=4, seed=3, **knobs)
    buffer.add([group(i, 1 + i % 3) for i in range(num_prompts)], iteration=1)
    return buffer


def drawn(buffer):
    return [d.prompt_id for d in buffer.sample(8)]


def test_a_parent_saves_and_restores_it(tmp_path):
    parent = Parent(filled())
    path = parent.save_to_path(tmp_path)
    saved = {p.name for p in (tmp_path / "replay_buffer").iterdir()}
    assert "replay.json" in saved
    assert not any(name.endswith((".pkl", ".msgpack")) for name in saved)
    expected = contents(parent.buffer, range(30)), drawn(parent.buffer)
    other = Parent()
    other.restore_from_path(path)
    assert (contents(other.buffer, range(30)), drawn(other.buffer)) == expected


def test_a_parent_restores_the_component_alone(tmp_path):
    parent = Parent(filled())
    path = parent.save_to_path(tmp_path)
    other = Parent()
    other.steps = 7
    other.restore_from_path(f"{path}/replay_buffer", component="replay_buffer")
    assert other.steps == 7
    assert contents(other.buffer, range(30)) == contents(parent.buffer, range(30))


def test_a_parent_comes_from_its_checkpoint(tmp_path):
    parent = Parent(filled())
    other = Parent.from_checkpoint(parent.save_to_path(tmp_path))
    assert contents(other.buffer, range(30)) == contents(parent.buffer, range(30))


def test_a_parent_saves_only_what_changed(tmp_path):
    parent = Parent(filled(num_prompts=3000))
    parent.save_to_path(tmp_path / "1")
    parent.buffer.record([group("late", 2)], 2)
    parent.save_to_path(tmp_path / "2")
    shared = [
        (tmp_path / "1/replay_buffer" / file.name).exists()
        for file in (tmp_path / "2/replay_buffer").glob("*.parquet")
    ]
    assert shared.count(True) == 2  # completions and prompts of the first save
    other = Parent.from_checkpoint(tmp_path / "2")
    assert other.buffer.bucket("late") == 2
    assert len(other.buffer) == 3001


def test_a_state_from_elsewhere_is_what_is_saved(tmp_path):
    buffer, other = filled(), ExGRPOReplayBuffer(group_size=4)
    other.add([group("x", 2)])
    buffer.save_to_path(tmp_path / "a")
    old = buffer.get_state()
    buffer.add([group("y", 2)])
    for state, size, bucket in ((other.get_state(), 1, None), (old, 30, None)):
        buffer.save_to_path(tmp_path / "b", state=state)
        restored = ExGRPOReplayBuffer.from_checkpoint(tmp_path / "b")
        assert len(restored) == size
        assert restored.bucket("y") is bucket
    buffer.save_to_path(tmp_path / "a")  # still its own
    assert ExGRPOReplayBuffer.from_checkpoint(tmp_path / "a").bucket("y") == 2


def test_choosing_makes_a_state_outdated(tmp_path):
    buffer = filled()
    buffer.save_to_path(tmp_path)
    draws = buffer.draw(1, 0)
    state = buffer.get_state()
    buffer.choose(draws, [np.zeros(len(draws[0].candidates))])
    buffer.save_to_path(tmp_path, state=state)
    restored = ExGRPOReplayBuffer.from_checkpoint(tmp_path)
    assert (
        restored.store.table["times_replayed"][restored.store.table.live_rows()].sum()
        == 0
    )


def test_from_checkpoint_keeps_the_knobs_but_for_those_given(tmp_path):
    buffer = filled(mu=0.25, max_age=3, metadata={"tokenizer": "t"})
    path = buffer.save_to_path(tmp_path)
    other = ExGRPOReplayBuffer.from_checkpoint(path, max_age=9)
    assert other.knobs == {**buffer.knobs, "max_age": 9}


def test_a_path_that_is_no_buffer_is_refused(tmp_path):
    with pytest.raises(ReplayFileError, match=str(tmp_path)):
        filled().restore_from_path(tmp_path)


def test_constructor_arguments_rebuild_it():
    buffer = filled(sigma=0.3)
    args, kwargs = buffer.get_ctor_args_and_kwargs()
    assert ExGRPOReplayBuffer(*args, **kwargs).knobs == buffer.knobs


def test_it_survives_pickling():
    buffer = filled()
    other = pickle.loads(pickle.dumps(buffer))
    assert contents(other, range(30)) == contents(buffer, range(30))
    assert drawn(other) == drawn(buffer)


def test_sample_counts_ages_from_the_newest_weights_seen():
    buffer = filled(max_age=2)
    buffer.add([group("new", 2, version=3)])
    assert [d.prompt_id for d in buffer.sample(99)] == ["new"]
    assert len(buffer.sample()) == 1
