"""The replay buffer against a naive one: plain dicts and lists, obviously right."""

import itertools
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from replay_helpers import completion, key

from rllib_exgrpo.records import Group
from rllib_exgrpo.replay import saving, table
from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.files import ReplayFiles
from rllib_exgrpo.replay.folder import Folder

G = 3
PROMPTS = [0, 1, 2, "0", "a", (1, "b"), ("c", (2,)), None]


class SmallBuffer(ReplayBuffer):
    segment_tokens = 16  # so that segments fill, die and are copied all the time


class NaiveBuffer:
    """The rules, written down without any thought of speed."""

    def __init__(self, cap, max_age, mark_failed):
        self.cap, self.max_age, self.mark_failed = cap, max_age, mark_failed
        self.bucket = {}  # prompt id -> k
        self.stored = {}  # prompt id -> [[key, replays, entropy]], oldest first
        self.retired = set()
        self.replays = {}  # prompt id -> how often, while it is known
        self.distinct = 0

    def replay(self, p):
        self.distinct += p not in self.replays
        self.replays[p] = self.replays.get(p, 0) + 1

    def record(self, groups):
        for group in groups:
            k = sum(c.reward >= 1.0 for c in group.members)
            p = group.prompt_id
            if p in self.retired:
                continue
            if k == G:
                self.retired.add(p)
                self.forget(p)
            elif k == 0:
                if p in self.bucket and self.mark_failed:
                    self.bucket[p] = 0
            else:
                self.store(p, k, [key(c) for c in group.completions if c.reward >= 1])

    def store(self, p, k, fresh):
        if p not in self.bucket and not fresh:
            return
        self.bucket[p] = k
        items = self.stored.setdefault(p, [])
        for new in fresh:
            if all(new[0] != old[0][0] for old in items):
                items.append([new, 0, None])
        if self.cap is not None:
            del items[: max(len(items) - self.cap, 0)]

    def forget(self, p):
        self.bucket.pop(p, None)
        self.stored.pop(p, None)

    def age(self, version):
        if self.max_age is None:
            return
        for p in list(self.stored):
            self.stored[p] = [
                item for item in self.stored[p] if version - item[0][3] <= self.max_age
            ]
            if not self.stored[p]:
                self.forget(p)
                self.replays.pop(p, None)

    @property
    def drawable(self):
        return {p for p, k in self.bucket.items() if k > 0}


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=7)
rewards = st.sampled_from([0.0, 0.5, 1.0, 1.0, float("nan")])


class ReplayMachine(RuleBasedStateMachine):
    @initialize(
        cap=st.sampled_from([None, 1, 3]),
        max_age=st.sampled_from([None, 2]),
        mark_failed=st.booleans(),
        max_candidates=st.sampled_from([None, 2]),
        selection=st.sampled_from(["bucket", "uniform"]),
    )
    def start(self, cap, max_age, mark_failed, max_candidates, selection):
        self.knobs = {
            "group_size": G,
            "prompt_selection": selection,
            "max_completions_per_prompt": cap,
            "max_age": max_age,
            "mark_failed": mark_failed,
            "max_candidates": max_candidates,
        }
        self.buffer = SmallBuffer(**self.knobs, seed=0)
        self.model = NaiveBuffer(cap, max_age, mark_failed)
        self.version = 0
        self.chosen = {}  # prompt id -> completion, drawn and not yet recorded
        self.files = ReplayFiles()
        self.folders = tempfile.TemporaryDirectory()

    def teardown(self):
        if hasattr(self, "folders"):
            self.folders.cleanup()

    @rule(data=st.data(), num=st.integers(1, 6))
    def record(self, data, num):
        self.version += 1
        groups = []
        for _ in range(num):
            p = data.draw(st.sampled_from(PROMPTS))
            replayed = self.chosen.pop(p, None)
            fresh = [
                completion(
                    data.draw(tokens),
                    data.draw(rewards),
                    # Slower runners may still have older weights.
                    self.version - data.draw(st.integers(0, 1)),
                    iteration=self.version,
                    truncated=data.draw(st.booleans()),
                )
                for _ in range(G - (replayed is not None))
            ]
            groups.append(Group(p, np.zeros(1, np.int32), fresh, replayed))
        self.buffer.record(groups, self.version)
        self.model.record(groups)

    @rule(num=st.integers(0, 10), ahead=st.integers(0, 1), data=st.data())
    def draw_and_choose(self, num, ahead, data):
        draws = self.buffer.draw(num, self.version + ahead)
        self.model.age(self.version + ahead)
        assert len(draws) == min(num, len(self.model.drawable))
        assert len({d.prompt_id for d in draws}) == len(draws)
        most = self.knobs["max_candidates"] or 99
        scores = []
        for draw in draws:
            assert draw.prompt_id in self.model.drawable
            assert draw.bucket == self.model.bucket[draw.prompt_id]
            offered = self.model.stored[draw.prompt_id][-most:]
            assert [key(c) for c in draw.candidates] == [item[0] for item in offered]
            few = st.integers(0, 4)
            scores.append(np.array([data.draw(few) / 4 for _ in draw.candidates]))
        chosen = self.buffer.choose(draws, scores)
        for draw, score, item in zip(draws, scores, chosen, strict=True):
            offered = self.model.stored[draw.prompt_id][-most:]
            best = score.tolist().index(min(score))
            assert key(item.completion) == offered[best][0]
            offered[best][1] += 1
            for stored, value in zip(offered, score, strict=True):
                stored[2] = value
            self.chosen[draw.prompt_id] = item.completion
            self.model.replay(draw.prompt_id)
            assert item.rank == 1
            assert item.age == self.version + ahead - item.completion.weights_version

    @rule()
    def restore_from_a_state(self):
        state = self.buffer.get_state()
        self.buffer = SmallBuffer(**self.knobs)
        self.buffer.set_state(state)

    @rule(folder=st.sampled_from("ab"), restore=st.booleans())
    def save(self, folder, restore):
        place = Folder.at(f"{self.folders.name}/{folder}")
        self.files.save(self.buffer, place)
        loaded, files = SmallBuffer(**self.knobs), ReplayFiles()
        files.load(loaded, place)
        self.agree(loaded)
        assert loaded.get_counters() == self.buffer.get_counters()
        twin = SmallBuffer(**self.knobs)
        twin.set_state(self.buffer.get_state())
        order = [d.prompt_id for d in twin.draw(4, self.version)]
        assert order == [d.prompt_id for d in loaded.draw(4, self.version)]
        if restore:
            self.buffer, self.files = SmallBuffer(**self.knobs), files
            files.load(self.buffer, place)

    @invariant()
    def both_agree(self):
        if hasattr(self, "buffer"):
            self.agree(self.buffer)

    def agree(self, buffer):
        model, store = self.model, buffer.store
        assert buffer.retired == model.retired
        assert {p: buffer.bucket(p) for p in PROMPTS if p not in model.retired} == {
            p: model.bucket.get(p) for p in PROMPTS if p not in model.retired
        }
        for p in PROMPTS:
            expected = model.stored.get(p, [])
            assert [key(c) for c in buffer.completions(p)] == [i[0] for i in expected]
            if expected:
                rows = buffer.rows_of(p)
                replays = store.table["times_replayed"][rows].tolist()
                assert replays == [i[1] for i in expected]
                entropy = store.table["entropy"][rows].tolist()
                assert [None if np.isnan(e) else e for e in entropy] == [
                    i[2] for i in expected
                ]
        for p, replays in model.replays.items():
            row = buffer.prompts.row(p)
            assert buffer.prompts.table["times_replayed"][row] == replays
        assert buffer.get_metrics()["distinct_prompts_replayed"] == model.distinct
        everything = list(itertools.chain.from_iterable(model.stored.values()))
        assert buffer.num_completions == len(everything)
        assert store.num_tokens == sum(len(i[0][0]) for i in everything)
        assert len(buffer) == len(model.bucket)
        sizes = np.bincount(list(model.bucket.values()), minlength=G)
        np.testing.assert_array_equal(buffer.bucket_sizes, sizes)
        written = sum(s.used - s.dead for s in store.segments.values())
        assert written == store.num_tokens


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Makes pages, files and logs so small that all their limits are met."""
    monkeypatch.setattr(table, "_PAGE_BITS", 2)
    monkeypatch.setattr(table, "_PAGE_ROWS", 4)
    monkeypatch.setattr(table, "_IN_PAGE", 3)
    monkeypatch.setattr(saving, "FILE_TOKENS", 40)
    monkeypatch.setattr(saving, "_MAX_LOG_FILES", 3)


@pytest.mark.usefixtures("small_parts")
class TestAgainstNaive(ReplayMachine.TestCase):
    settings = settings(
        max_examples=30,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
