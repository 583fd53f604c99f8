"""Brings the learners' weights to the env runners, and waits until they are there."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO

from rllib_exgrpo.exgrpo_config import ExGRPOConfig
from rllib_exgrpo.exgrpo_learner_group import ExGRPOLearnerGroup


class WeightSync:
    """Pushes weights, by the way that `weight_transfer` names.

    RLlib's own `sync_weights` drops a push while another is under way and only logs
    errors; a rollout with old weights would then go unnoticed.

    Args:
        learners: that have the weights.
        training_group: the env runners to which `weight_transfer` applies; others, of
            evaluations, get their weights through the object store.
        config: of the algorithm.
    """

    def __init__(
        self,
        learners: ExGRPOLearnerGroup,
        training_group: EnvRunnerGroup,
        config: ExGRPOConfig,
    ) -> None:
        self._learners = learners
        self._training_group = training_group
        self._backend = config.weight_transfer
        self._workers_per_engine = config.tensor_parallel_size
        self._connected: list[int] = []

    def push(
        self, group: EnvRunnerGroup, runner_ids: Sequence[int] | None = None
    ) -> int:
        """Brings the weights to env runners.

        Args:
            group: the env runners.
            runner_ids: those of them that were restarted; None means all.

        Returns:
            The version of the weights.
        """
        if self._backend == "object_store" or group is not self._training_group:
            return self._push_by_object_store(group, runner_ids)
        return self._push_by_engines(restarted=runner_ids is not None)

    def _push_by_object_store(
        self, group: EnvRunnerGroup, runner_ids: Sequence[int] | None
    ) -> int:
        state = self._learners.get_state(
            components=COMPONENT_LEARNER + "/" + COMPONENT_RL_MODULE,
            inference_only=True,
        )[COMPONENT_LEARNER]
        if group.local_env_runner is not None:
            group.local_env_runner.set_state(state)
        if group.num_remote_env_runners() > 0:
            group.foreach_env_runner(
                "set_state",
                kwargs={"state": ray.put(state)},
                local_env_runner=False,
                remote_worker_ids=None if runner_ids is None else list(runner_ids),
            )
        return int(state[WEIGHTS_SEQ_NO])

    def _push_by_engines(self, *, restarted: bool) -> int:
        """Sends to all engines; they are one group, which a restart breaks."""
        alive = self._training_group.healthy_env_runner_ids()
        if restarted or alive != self._connected:
            self._connect(alive)
        version = self._learners.send_weights()
        self._training_group.foreach_env_runner(
            "set_weights_version",
            kwargs={"version": version},
            local_env_runner=False,
        )
        return version

    def _connect(self, alive: list[int]) -> None:
        actors: dict[int, Any] = self._training_group._worker_manager.actors()
        runners = [actors[runner_id] for runner_id in alive]
        step = "shutdown_weight_transfer_engine"  # of a group that is no more
        ray.get([runner.transfer.remote(step) for runner in runners])
        self._learners.open_weight_transfer(
            self._backend, runners, self._workers_per_engine
        )
        self._connected = alive
