"""Weights from the learners to the engines by vLLM's own transfer. No Ray, no vLLM.

vLLM sends weights over NCCL, or shares them by CUDA IPC on one GPU, without a copy on
the CPU. The first learner sends, and drives the engines by remote calls: it connects
them once, and for each synchronisation has them start, take what it sends, and finish.

Not run on a GPU: tested with another transport in place of NCCL.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import torch


class WeightMetadata(NamedTuple):
    """What is known of a weight before it is sent.

    Attributes:
        name: the Hugging Face name.
        dtype: as it is sent.
        shape: of the whole weight.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class InferenceWeights(Protocol):
    """Who has the weights, see `ExGRPORLModule`."""

    def inference_metadata(self) -> list[WeightMetadata]:
        """Describes the weights."""

    def inference_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights; collective."""


class WeightSource:
    """Weights in the form in which vLLM's senders ask for them.

    Args:
        weights: who has them.
    """

    def __init__(self, weights: InferenceWeights) -> None:
        self._weights = weights

    def metadata(self) -> list[WeightMetadata]:
        """Describes the weights, in the order of iteration."""
        return self._weights.inference_metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._weights.inference_weights()


class EngineCall(Protocol):
    """Makes one call to each engine, and waits for all."""

    def __call__(self, step: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Calls a step of the transfer.

        Args:
            step: name of the method of vLLM's workers.
            arguments: for each engine.
        """


class EngineClient:
    """The remote control of all engines, as vLLM's senders use it.

    Args:
        call: makes the calls.
        num_engines: how many there are.
        workers_per_engine: GPUs of an engine (tensor parallelism).
    """

    def __init__(
        self, call: EngineCall, num_engines: int, workers_per_engine: int
    ) -> None:
        self._call = call
        self._num_engines = num_engines
        self._workers_per_engine = workers_per_engine

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Connects the engines; each one's workers take the next ranks."""
        infos = [dict(init_info) for _ in range(self._num_engines)]
        if "rank_offset" in init_info:
            for index, info in enumerate(infos):
                info["rank_offset"] += index * self._workers_per_engine
        arguments = [(info,) for info in infos]
        self._call("init_weight_transfer_engine", arguments)

    def start_weight_update(self) -> None:
        """Prepares the engines."""
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Has the engines take what is sent meanwhile."""
        self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Has the engines use the new weights."""
        del weight_version
        self._all("finish_weight_update")

    def _all(self, step: str, *arguments: Any) -> None:
        self._call(step, [arguments] * self._num_engines)


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
