"""The language model as an RLlib module."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override

from rllib_exgrpo.lora import merged, own_parameters
from rllib_exgrpo.policy import LanguagePolicy
from rllib_exgrpo.training_engine import TrainingEngine, WholeParameters
from rllib_exgrpo.weight_transfer import WeightMetadata


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
        if inference_only:
            values = self.inference_weights()
        else:
            own = self.policy.model.state_dict(keep_vars=True)
            values = ((name, self.engine.read(tensor)) for name, tensor in own.items())
        state = {name: self._on_cpu(value) for name, value in values}
        return state if self.engine.is_first else {}

    @torch.no_grad()
    def inference_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights that the engine takes, one at a time, where they are.

        They are in `model_dtype`, with LoRA adapters merged. A collective call.
        """
        for name, tensor, layer in own_parameters(self.policy.model):
            weight = self.engine.read(tensor)
            adapters = () if layer is None else tuple(layer.parameters())
            with self.engine.whole(adapters):
                value = merged(weight, layer)
            yield name, value.to(self._dtype_of(value))

    def inference_metadata(self) -> list[WeightMetadata]:
        """Describes what `inference_weights` yields, without gathering anything."""
        return [
            WeightMetadata(
                name,
                self._dtype_of(tensor),
                # A parameter that ZeRO-3 has partitioned is empty, but knows its shape.
                tuple(getattr(tensor, "ds_shape", tensor.shape)),
            )
            for name, tensor, _ in own_parameters(self.policy.model)
        ]

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        dtype = getattr(torch, self.model_config["dtype"])
        return dtype if tensor.is_floating_point() else tensor.dtype

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
