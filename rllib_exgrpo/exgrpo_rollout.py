"""Sends rollout requests to env runners and brings all results back."""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_exgrpo.evaluation.sets import EvaluationSet
from rllib_exgrpo.records import PromptId, RolloutRequest, RolloutResult, deal

logger = logging.getLogger(__name__)

_TAG = "rollout"
_MAX_LOSSES = 3
_POLL_S = 1.0
_REPORT_EVERY_S = 30.0
_RESTART_S = 600.0


class RolloutDispatcher:
    """Splits a rollout over env runners; `start` returns at once, `collect` waits.

    With the local env runner only, `collect` does the work.

    Args:
        group: the env runners.
        revive: brings failed runners back, with current weights.
        seed: of the run; each request gets a seed of its own derived from it.
        weights_version: of the weights that the runners must sample with.
        timeout_s: longest wait for the results of one rollout; None waits as long as
            the runners live.
    """

    def __init__(
        self,
        group: EnvRunnerGroup,
        *,
        revive: Callable[[], None],
        seed: int,
        weights_version: Callable[[], int],
        timeout_s: float | None = None,
    ) -> None:
        self._group = group
        self._revive = revive
        self._seed = seed
        self._timeout_s = timeout_s
        self._weights_version = weights_version
        self._requests: list[RolloutRequest] = []
        self._waiting: list[int] = []  # positions in `_requests`, not yet sent
        self._in_flight: dict[int, int] = {}  # runner id -> position

    def start(
        self,
        prompt_ids: Sequence[PromptId],
        counts: Sequence[int],
        *,
        temperature: float,
        steps_done: int,
        evaluation_set: EvaluationSet | None = None,
        stream: int = 0,
    ) -> None:
        """Sends out the requests; the prompts are dealt out to the runners.

        Args:
            prompt_ids: which problems.
            counts: completions wanted of each.
            temperature: 0 is greedy.
            steps_done: training steps before this one.
            evaluation_set: whose environment holds the problems; None means that of
                training.
            stream: of random numbers; rollouts of one iteration take different ones.
        """
        num_shares = len(self._live_runners()) if self._is_remote else 1
        shares = deal(range(len(prompt_ids)), num_shares)
        self._requests = [
            RolloutRequest(
                prompt_ids=[prompt_ids[i] for i in share],
                counts=[counts[i] for i in share],
                temperature=temperature,
                seed=request_seed(self._seed, steps_done, stream, position),
                iteration=steps_done + 1,
                evaluation_set=evaluation_set,
            )
            for position, share in enumerate(shares)
            if share
        ]
        self._waiting = list(range(len(self._requests)))
        if self._is_remote:
            self._send_waiting()

    def collect(self) -> list[RolloutResult]:
        """Waits for the results; requests of runners that died are sent again.

        Returns:
            The results of the requests; see `groups_of` for the groups.

        Raises:
            RuntimeError: if a runner reports an error or samples with other weights,
                runners keep dying, or the time is up.
        """
        if not self._is_remote:
            runner = self._group.local_env_runner
            return [self._checked(runner.rollout(r)) for r in self._requests]
        results: dict[int, RolloutResult] = {}
        losses, started, reported = 0, time.monotonic(), time.monotonic()
        while len(results) < len(self._requests):
            for runner_id, result in self._group.fetch_ready_async_reqs(
                tags=_TAG, timeout_seconds=_POLL_S
            ):
                results[self._in_flight.pop(runner_id)] = self._checked(result)
            losses += self._take_back_lost()
            if losses > _MAX_LOSSES:
                raise RuntimeError(
                    f"Env runners died {losses} times during one rollout. Look for the "
                    "cause in their logs, then resume from the last checkpoint."
                )
            self._send_waiting()
            now = time.monotonic()
            if now - reported > _REPORT_EVERY_S:
                reported = now
                self._report(now - started)
            if self._timeout_s is not None and now - started > self._timeout_s:
                raise RuntimeError(
                    f"`sample_timeout_s`={self._timeout_s} is over and env runners "
                    f"{sorted(self._in_flight)} have not answered. Raise it, or set it "
                    "to None to wait as long as they live."
                )
        return [results[position] for position in range(len(self._requests))]

    @property
    def _is_remote(self) -> bool:
        return self._group.num_remote_env_runners() > 0

    def _live_runners(self) -> list[int]:
        started = time.monotonic()
        while not (live := self._group.healthy_env_runner_ids()):
            waited = time.monotonic() - started
            if waited > _RESTART_S:
                raise RuntimeError(
                    f"No env runner has come back to life in {waited:.0f} s. Look for "
                    "the cause in their logs (often memory: lower `kv_cache_bytes` or "
                    "`gpu_memory_utilization`), then resume from the last checkpoint."
                )
            logger.warning("No env runner is alive; waiting for one to restart.")
            self._revive()  # waits `env_runner_health_probe_timeout_s` for it
        return list(live)

    def _send_waiting(self) -> None:
        if not self._waiting:
            return
        for runner_id in self._live_runners():
            if self._waiting and runner_id not in self._in_flight:
                position = self._waiting.pop(0)
                self._in_flight[runner_id] = position
                self._group.foreach_env_runner_async(
                    "rollout",
                    tag=_TAG,
                    kwargs={"request": self._requests[position]},
                    remote_worker_ids=[runner_id],
                )

    def _take_back_lost(self) -> int:
        live = set(self._group.healthy_env_runner_ids())
        lost = [runner_id for runner_id in self._in_flight if runner_id not in live]
        for runner_id in lost:
            logger.warning("Env runner %d died; its prompts are sent again.", runner_id)
            self._waiting.append(self._in_flight.pop(runner_id))
        if lost:
            self._revive()
        return len(lost)

    def _report(self, seconds: float) -> None:
        prompts = [
            prompt_id
            for position in self._in_flight.values()
            for prompt_id in self._requests[position].prompt_ids
        ]
        logger.warning(
            "Waiting %.0f s for env runners %s with %d prompts, the first being %r.",
            seconds,
            sorted(self._in_flight),
            len(prompts),
            prompts[0] if prompts else None,
        )

    def _checked(self, result: RolloutResult) -> RolloutResult:
        if result.error is not None:
            raise RuntimeError(
                f"An env runner failed during a rollout:\n{result.error}"
            )
        if result.weights_version != (wanted := self._weights_version()):
            raise RuntimeError(
                f"An env runner sampled with weights of version "
                f"{result.weights_version}; the learners' are {wanted}. Its set_state "
                "must have failed: look for the cause in its log, then resume from the "
                "last checkpoint."
            )
        return result


def request_seed(seed: int, iteration: int, stream: int, position: int) -> int:
    """Derives the seed of a request.

    Args:
        seed: of the run.
        iteration: training iteration.
        stream: tells requests of the iteration for different ends apart.
        position: of the request among those.
    """
    entropy = [seed, iteration, stream, position]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
