"""The learners as one: collective reads of the state, sharded scoring and updates."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_OPTIMIZER
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.annotations import override

from rllib_exgrpo.batching import Rows, plan_shards, shard_mini_batches


class ExGRPOLearnerGroup(LearnerGroup):
    """A learner group whose parameters and optimiser may be sharded (ZeRO)."""

    @property
    def num_shards(self) -> int:
        """How many learners share each mini-batch."""
        return max(self.config.num_learners, 1)

    @override(LearnerGroup)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns the first learner's state, with the optimiser shards of all.

        RLlib asks one learner only, which waits for the others for ever where reading
        the parameters is a collective call.
        """
        if not self._check_component(COMPONENT_LEARNER, components, not_components):
            return {}
        states = self._call_all(
            "get_state",
            {
                "components": self._get_subcomponents(COMPONENT_LEARNER, components),
                "not_components": self._get_subcomponents(
                    COMPONENT_LEARNER, not_components
                ),
                **kwargs,
            },
        )
        state = dict(states[0])
        if COMPONENT_OPTIMIZER in state:
            state[COMPONENT_OPTIMIZER] = [s[COMPONENT_OPTIMIZER] for s in states]
        return {COMPONENT_LEARNER: state}

    def train(self, mini_batches: Sequence[Rows], **kwargs: Any) -> list[Any]:
        """Makes one optimiser update for each mini-batch, shared by all learners.

        Args:
            mini_batches: rows of whole groups.
            kwargs: for `ExGRPOLearner.update`.

        Returns:
            The metrics of each learner.
        """
        shares = shard_mini_batches(
            mini_batches, self.num_shards, self.config.max_tokens_per_micro_batch
        )
        data = (
            TrainingData(batches=shares)
            if self.is_remote
            else TrainingData(batch=shares[0])
        )
        return self.update(training_data=data, **kwargs)

    def replayed_rows(self) -> NDArray[np.float64]:
        """Returns what the last `train` saw of the replayed rows of all learners.

        Returns:
            (R, 4), see `ExGRPOLearner.replayed_rows`.
        """
        return np.concatenate(self._call_all("replayed_rows", {}))

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """Scores completions under the current policy, shared by all learners.

        Args:
            rows: the completions.

        Returns:
            (2, B) mean token entropy and mean negative log-prob of each row, in nats.
        """
        plans = plan_shards(
            rows.total_lengths_B,
            self.num_shards,
            self.config.max_tokens_per_micro_batch,
        )
        results = self._call_all(
            "score",
            [{"micro_batches": [rows.take(i) for i in plan]} for plan in plans],
        )
        scores = np.zeros((2, len(rows)), np.float32)
        for plan, result in zip(plans, results, strict=True):
            scores[:, np.concatenate(plan)] = result
        return scores

    def _call_all(
        self, method: str, kwargs: dict[str, Any] | list[dict[str, Any]]
    ) -> list[Any]:
        if self.is_local:
            own = kwargs if isinstance(kwargs, dict) else kwargs[0]
            return [getattr(self._learner, method)(**own)]
        return self._get_results(
            self._worker_manager.foreach_actor(method, kwargs=kwargs)
        )
