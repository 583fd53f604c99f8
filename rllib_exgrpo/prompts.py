"""Which prompts get fresh completions: seeded passes over the data, pure numpy."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.records import PromptId


class PromptCycle:
    """Draws prompt ids in seeded passes over the data.

    Each pass is a new permutation. A prompt that may not be drawn in a step because it
    is being replayed keeps its place at the front, so that no pass loses a prompt.

    Args:
        prompt_ids: all prompts of the training data.
        seed: of the permutations.
        retired_prompts: "drop" leaves retired prompts out at once, "until_pass_ends"
            from the next pass on, "keep" never.
    """

    def __init__(
        self,
        prompt_ids: Sequence[PromptId],
        seed: int | None = None,
        retired_prompts: str = "drop",
    ) -> None:
        self._prompt_ids = prompt_ids
        self._rng = np.random.default_rng(seed)
        self._retired_prompts = retired_prompts
        self._postponed: list[int] = []
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)
        self._position = 0
        self.num_passes = 0

    def draw(
        self,
        num_prompts: int,
        *,
        exclude: Collection[PromptId] = (),
        is_retired: Callable[[PromptId], bool] = lambda _: False,
        is_usable: Callable[[PromptId], bool] = lambda _: True,
    ) -> list[PromptId]:
        """Draws the next prompts of the pass, starting new passes as needed.

        Args:
            num_prompts: how many to draw.
            exclude: prompts that may not be drawn now; they keep their place.
            is_retired: tells the retired prompts.
            is_usable: tells whether a prompt that would be drawn can be; asked last.

        Returns:
            At most `num_prompts` distinct prompt ids; fewer only when the data holds
            no more that may be drawn.
        """
        drops_now = self._retired_prompts == "drop"
        busy = set(exclude)
        drawn: list[PromptId] = []
        postponed: list[int] = []
        may_start_pass = True  # one whole pass shows all there is
        while len(drawn) < num_prompts:
            index = self._next_index()
            if index is None:
                if not may_start_pass:
                    break
                may_start_pass = False
                self._start_pass(is_retired)
                continue
            prompt_id = self._prompt_ids[index]
            if prompt_id in busy:
                postponed.append(index)
            elif not (drops_now and is_retired(prompt_id)) and is_usable(prompt_id):
                busy.add(prompt_id)
                drawn.append(prompt_id)
        # Once each: a prompt replayed through several passes is owed one draw only.
        self._postponed = list(dict.fromkeys(postponed + self._postponed))
        return drawn

    def _start_pass(self, is_retired: Callable[[PromptId], bool]) -> None:
        order = self._rng.permutation(len(self._prompt_ids))
        # "drop" asks when it draws: that spares a look at every id of a large table.
        if self._retired_prompts == "until_pass_ends":
            kept = [not is_retired(self._prompt_ids[i]) for i in order]
            order = order[np.array(kept, bool)]
        self._order = order
        self._position = 0
        self.num_passes += 1

    def _next_index(self) -> int | None:
        if self._postponed:
            return self._postponed.pop(0)
        if self._position == len(self._order):
            return None
        self._position += 1
        return int(self._order[self._position - 1])

    def get_state(self) -> dict[str, Any]:
        """Returns the position in the data as plain data."""
        return {
            "num_prompts": len(self._prompt_ids),
            "rng": self._rng.bit_generator.state,
            "order": self._order,
            "position": self._position,
            "postponed": list(self._postponed),
            "num_passes": self.num_passes,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from the position that `get_state` returned.

        Raises:
            ValueError: if the data has another number of prompts than when saved.
        """
        if state["num_prompts"] != len(self._prompt_ids):
            raise ValueError(
                f"The checkpoint was written with {state['num_prompts']} training "
                f"prompts, but the environment now has {len(self._prompt_ids)}. "
                "Restore with the same `env_config`, or start a new run from the "
                "weights alone."
            )
        self._rng.bit_generator.state = state["rng"]
        self._order = np.array(state["order"])
        self._position = state["position"]
        self._postponed = list(state["postponed"])
        self.num_passes = state["num_passes"]
