"""What a replay buffer holds, and its state."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.records import Completion, PromptId
from rllib_exgrpo.replay.knobs import ReplayKnobs
from rllib_exgrpo.replay.prompt_table import Members, PromptTable
from rllib_exgrpo.replay.segment import Spill
from rllib_exgrpo.replay.store import SEGMENT_TOKENS, CompletionStore

_COUNTERS = {
    "revision": 0,  # how often something changed
    "next_id": 0,  # for the next completion that is stored
    "iteration": 0,  # the latest recorded
    "newest_version": 0,  # the newest weights seen
    "distinct_prompts_replayed": 0,
}


class ReplayContents(ReplayKnobs):
    """Prompts by bucket, completions by prompt, a random generator and counters."""

    segment_tokens = SEGMENT_TOKENS

    def __post_init__(self) -> None:
        """Checks the knobs and starts empty."""
        super().__post_init__()
        self._rng = np.random.default_rng(self.seed)
        self._clear()

    def _clear(self) -> None:
        self.prompts = PromptTable(self.group_size + 1)
        self.store = CompletionStore(self.segment_tokens, self._spill())
        self.sources: dict[str, int] = {}
        self._evicted: list[int] = []  # rows to discard at the end of a step
        self._counts = dict(_COUNTERS)

    def _spill(self) -> Spill | None:
        if self.disk_path is None:
            return None
        from rllib_exgrpo.replay.mapped import MappedSegments  # needs pyarrow

        return MappedSegments(self.disk_path)

    def __len__(self) -> int:
        """Returns how many prompts are stored, those in bucket 0 included."""
        return int(self.bucket_sizes.sum())

    @property
    def num_completions(self) -> int:
        """Stored completions, over all prompts."""
        return len(self.store)

    @property
    def num_retired(self) -> int:
        """Prompts that were solved by a whole group."""
        return len(self.prompts.members[self.group_size])

    @property
    def bucket_sizes(self) -> NDArray[np.int64]:
        """(G,) prompts in bucket k = 0..G-1."""
        return np.array([len(m) for m in self.prompts.members[:-1]], dtype=np.int64)

    @property
    def retired(self) -> Members:
        """A live, read-only view of the ids of the retired prompts."""
        return Members(self.prompts, self.group_size)

    @property
    def newest_version(self) -> int:
        """The newest weights that the buffer has seen."""
        return self._counts["newest_version"]

    @property
    def revision(self) -> int:
        """A number that rises whenever something changes."""
        return self._counts["revision"]

    def is_retired(self, prompt_id: PromptId) -> bool:
        """Whether a prompt was solved by a whole group."""
        return prompt_id in self.retired

    def bucket(self, prompt_id: PromptId) -> int | None:
        """Returns the bucket of a prompt; G if retired, None if it is not known."""
        row = self.prompts.row(prompt_id)
        return None if row is None else int(self.prompts.table["bucket"][row])

    def completions(self, prompt_id: PromptId) -> list[Completion]:
        """Returns the stored completions of a prompt, oldest first, as in a `Draw`."""
        return self.store.completions(self.rows_of(prompt_id))

    def rows_of(self, prompt_id: PromptId) -> list[int]:
        """Returns the rows of a prompt's completions in the store, oldest first."""
        row = self.prompts.row(prompt_id)
        return [] if row is None else self._rows_of(row)

    def get_metrics(self) -> dict[str, float]:
        """Returns the sizes of the buffer, by name."""
        metrics = {
            "prompts": float(len(self)),
            "completions": float(self.num_completions),
            "tokens": float(self.store.num_tokens),
            "retired": float(self.num_retired),
            "distinct_prompts_replayed": float(
                self._counts["distinct_prompts_replayed"]
            ),
        }
        for k, size in enumerate(self.bucket_sizes):
            metrics[f"bucket_{k}"] = float(size)
        return metrics

    def _rows_of(self, prompt: int) -> list[int]:
        return self.store.chain(int(self.prompts.table["newest"][prompt]))

    def _members_at_random(self, bucket: int, count: int) -> list[int]:
        members = self.prompts.members[bucket]
        if count == 0:
            return []
        places = self._rng.choice(len(members), count, replace=False)
        return [members[place] for place in places]

    def _saw_version(self, version: int) -> None:
        self._counts["newest_version"] = max(self.newest_version, int(version))

    def _changed(self) -> None:
        self._counts["revision"] += 1

    # State.

    def get_counters(self) -> dict[str, Any]:
        """Returns the state apart from prompts and completions."""
        return {
            "rng": self._rng.bit_generator.state,
            "sources": list(self.sources),
            **self._counts,
        }

    def get_state(self) -> dict[str, Any]:
        """Returns all there is to restore, as plain arrays, lists and dicts.

        The token arrays are read-only views, not copies; what they show never changes.
        """
        return {
            "group_size": self.group_size,
            "counters": self.get_counters(),
            "prompts": self.prompts.get_state(),
            "completions": self._completions_state(),
        }

    def _completions_state(self) -> dict[str, Any]:
        state = self.store.get_state()
        columns = state["columns"]
        rows = self.prompts.table.live_rows()
        columns["prompt"] = np.searchsorted(rows, columns["prompt"]).astype(np.int32)
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Replaces the contents by what `get_state` returned.

        Raises:
            ValueError: if the state is of another group size.
        """
        if state["group_size"] != self.group_size:
            raise ValueError(
                f"`group_size` is {self.group_size}, but the replay buffer to restore "
                f"was filled with groups of {state['group_size']}, whose buckets mean "
                "other pass rates: use that group size, start an empty buffer, or give "
                "the saved one as `warm_start`, which converts the buckets."
            )
        self._clear()
        counters = state["counters"]
        self._rng.bit_generator.state = counters["rng"]
        self._counts = {name: counters[name] for name in _COUNTERS}
        self.sources = {name: i for i, name in enumerate(counters["sources"])}
        self.prompts.set_state(state["prompts"])
        num_prompts = len(state["prompts"]["ids"])
        newest = self.store.set_state(state["completions"], num_prompts)
        self.prompts.table["newest"][np.arange(num_prompts)] = newest

    def __getstate__(self) -> dict[str, Any]:
        return {"knobs": self.knobs, "state": ReplayContents.get_state(self)}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        ReplayKnobs.__init__(self, **pickled["knobs"])
        self.set_state(pickled["state"])
