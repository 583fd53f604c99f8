"""The learners as one: collective reads of the state, sharded scoring and updates."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.rllib.core import COMPONENT_LEARNER
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
        """Returns the first learner's state, to which all contribute.

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
        return {COMPONENT_LEARNER: states[0]}

    def train(self, mini_batches: Sequence[Rows], **kwargs: Any) -> list[Any]:
        """Makes one optimiser update for each mini-batch, shared by all learners.

        Args:
            mini_batches: rows of whole groups.
            kwargs: for `ExGRPOLearner.update`.

        Returns:
            The metrics of each learner.
        """
        shares = shard_mini_batches(
            mini_batches,
            self.num_shards,
            self.config.max_tokens_per_micro_batch,
            skip_zero_advantages=self.config.skips_zero_advantages,
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
        scores = np.zeros((2, len(rows)), np.float32)
        for index, result in self._on_shards("score", rows):
            scores[:, index] = result
        return scores

    def token_logp(self, rows: Rows) -> NDArray[np.float32]:
        """Computes log-probs under the current policy, shared by all learners.

        Args:
            rows: the completions.

        Returns:
            The log-probs of their tokens, row after row, in nats.
        """
        logp_B = [np.zeros(0, np.float32)] * len(rows)
        for index, result in self._on_shards("token_logp", rows):
            for row, logp_T in zip(index, result, strict=True):
                logp_B[row] = logp_T
        return np.concatenate([np.zeros(0, np.float32), *logp_B])

    def open_weight_transfer(
        self, backend: str, env_runners: Sequence[Any], workers_per_engine: int
    ) -> None:
        """Connects all learners with the engines of these actors."""
        self._call_all(
            "open_weight_transfer",
            {
                "backend": backend,
                "env_runners": env_runners,
                "workers_per_engine": workers_per_engine,
            },
        )

    def send_weights(self) -> int:
        """Sends the weights to the connected engines and returns their version."""
        return int(self._call_all("send_weights", {})[0])

    def _on_shards(
        self, method: str, rows: Rows
    ) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """Calls a method on all learners; yields their row positions and results."""
        plans = plan_shards(
            rows.total_lengths_B,
            self.num_shards,
            self.config.max_tokens_per_micro_batch,
        )
        results = self._call_all(
            method,
            [{"micro_batches": [rows.take(i) for i in plan]} for plan in plans],
        )
        return zip((np.concatenate(plan) for plan in plans), results, strict=True)

    def _call_all(
        self, method: str, kwargs: dict[str, Any] | list[dict[str, Any]]
    ) -> list[Any]:
        if self.is_local:
            own = kwargs if isinstance(kwargs, dict) else kwargs[0]
            return [getattr(self._learner, method)(**own)]
        return self._get_results(
            self._worker_manager.foreach_actor(method, kwargs=kwargs)
        )
