"""The language model as an RLlib module."""

from collections.abc import Collection
from typing import Any

import torch
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override

from rllib_exgrpo.lora import merged, own_parameters
from rllib_exgrpo.policy import LanguagePolicy
from rllib_exgrpo.training_engine import TrainingEngine, WholeParameters


class ExGRPORLModule(TorchRLModule):
    """A causal language model; its state is named as Hugging Face names it.

    `model_config` holds the arguments of `LanguagePolicy.from_pretrained`.

    Attributes:
        policy: the model.
        engine: what reads and writes its parameters; the learner sets its own.
    """

    @override(TorchRLModule)
    def setup(self) -> None:
        """Loads the model."""
        self.policy = LanguagePolicy.from_pretrained(**self.model_config)
        self.engine: TrainingEngine | WholeParameters = WholeParameters()

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
        parameters are sharded this is a collective call, whose result only the first
        learner keeps; the others return an empty dict.

        Args:
            components: of RLlib, unused.
            not_components: of RLlib, unused.
            inference_only: return what the engine takes: `model_dtype`, with LoRA
                adapters merged into the weights. Otherwise what is trained is float32,
                and adapters stand beside the weights.
            kwargs: of RLlib, unused.
        """
        model, state = self.policy.model, {}
        if inference_only:
            dtype = getattr(torch, self.model_config["dtype"])
            for name, tensor, layer in own_parameters(model):
                value = self._merged(tensor, layer)
                state[name] = value.to(dtype) if value.is_floating_point() else value
        else:
            for name, tensor in model.state_dict(keep_vars=True).items():
                state[name] = self._on_cpu(self.engine.read(tensor))
        return state if self.engine.is_first else {}

    @torch.no_grad()
    def _merged(self, tensor: torch.Tensor, layer: Any) -> torch.Tensor:
        """Returns a weight with its adapters added, on the CPU."""
        weight = self.engine.read(tensor)
        adapters = () if layer is None else tuple(layer.parameters())
        with self.engine.whole(adapters):
            return self._on_cpu(merged(weight, layer))

    def _on_cpu(self, value: torch.Tensor) -> torch.Tensor:
        """Copies a weight; where it would not be kept, returns an empty tensor."""
        return value.detach().to("cpu", copy=True) if self.engine.is_first else EMPTY

    @override(TorchRLModule)
    def set_state(self, state: dict[str, Any]) -> None:
        """Loads weights of `get_state`. A collective call, like it.

        Raises:
            ValueError: if weights are missing or belong to another model.
        """
        own = self.policy.model.state_dict(keep_vars=True)
        others = sorted(own.keys() ^ state.keys())
        if others:
            raise ValueError(
                f"The saved weights do not fit: {others[0]!r} and {len(others) - 1} "
                "more are only in the saved or only in this model. Restore with the "
                "`model_name_or_path` and `lora_config` they were saved with."
            )
        self.engine.write((own[n], torch.as_tensor(state[n])) for n in own)


EMPTY = torch.empty(0)
