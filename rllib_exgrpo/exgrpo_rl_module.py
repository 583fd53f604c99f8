"""The language model as an RLlib module."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override

from rllib_exgrpo.policy import LanguagePolicy


class ExGRPORLModule(TorchRLModule):
    """A causal language model; its state is named as Hugging Face names it.

    `model_config` holds the arguments of `LanguagePolicy.from_pretrained`.

    Attributes:
        policy: the model.
        gathered: context in which the parameters are whole; the learner sets its
            engine's.
    """

    @override(TorchRLModule)
    def setup(self) -> None:
        """Loads the model."""
        self.policy = LanguagePolicy.from_pretrained(**self.model_config)
        self.gathered: Callable[..., AbstractContextManager[None]] = _whole

    @override(TorchRLModule)
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self.policy(**batch)._asdict()

    @override(TorchRLModule)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Returns a copy of the model's weights on the CPU.

        Tied weights stand under each of their names, as the engine needs them. Where
        parameters are sharded this is a collective call.
        """
        with self.gathered():
            state = self.policy.model.state_dict()
            return {name: value.detach().cpu().clone() for name, value in state.items()}

    @override(TorchRLModule)
    def set_state(self, state: dict[str, Any]) -> None:
        """Loads weights; none may be missing. A collective call, like `get_state`."""
        tensors = {name: torch.as_tensor(value) for name, value in state.items()}
        with self.gathered(modify=True):
            self.policy.model.load_state_dict(tensors)


def _whole(*, modify: bool = False) -> AbstractContextManager[None]:
    return nullcontext()
