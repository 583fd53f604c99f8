"""What the learner needs of whatever holds parameters, gradients and optimiser.

`TorchEngine` is plain PyTorch in one process; `deepspeed_engine.DeepSpeedEngine` does
the same for parameters that are sharded over learners. Both obey the same rules:
gradients of `backward` add up until `step`; the gradient norm is clipped; an update
whose norm is not finite or above a bound is skipped; what is trained is kept in
float32, whatever the precision of the forward pass.

States are whole, by parameter name: they do not tell how parameters were sharded, so
that any engine continues from the state of any other.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

OptimizerState = Mapping[str, Mapping[str, Tensor]]
"""By parameter name: "step" (updates so far), "exp_avg" and "exp_avg_sq" of AdamW, on
the CPU; empty before the first update."""

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class UpdateRules:
    """How gradients become an update.

    Attributes:
        grad_clip: largest gradient norm; None does not clip.
        skip_above_norm: an update with a larger (unclipped) norm is skipped; None
            skips only norms that are not finite.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW.
    """

    grad_clip: float | None = 1.0
    skip_above_norm: float | None = 500.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def allows(self, grad_norm: float) -> bool:
        """Tells whether an update with this unclipped gradient norm is made."""
        bound = math.inf if self.skip_above_norm is None else self.skip_above_norm
        return math.isfinite(grad_norm) and grad_norm <= bound

    def clips(self, grad_norm: float) -> bool:
        """Tells whether gradients with this norm are scaled down."""
        return self.grad_clip is not None and grad_norm > self.grad_clip


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimiser update.

    Attributes:
        grad_norm: global gradient norm before clipping.
        applied: False if the update was skipped.
    """

    grad_norm: float
    applied: bool


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that skips updates whose gradient norm breaks the rules.

    The decision sits in the optimiser because DeepSpeed calls `step` itself, once for
    each shard, after it has found the norm over all shards.

    Args:
        params: the parameters to train.
        rules: the update rules.
        kwargs: for AdamW.
    """

    def __init__(self, params: Any, rules: UpdateRules, **kwargs: Any) -> None:
        super().__init__(
            params,
            betas=rules.betas,
            eps=rules.eps,
            weight_decay=rules.weight_decay,
            **kwargs,
        )
        self.rules = rules
        self.norm_of_shards: Callable[[], float] | None = None
        self.last_result = StepResult(grad_norm=math.nan, applied=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Applies the accumulated gradients, or skips them."""
        norm = self._clip() if self.norm_of_shards is None else self.norm_of_shards()
        applied = self.rules.allows(norm)
        self.last_result = StepResult(norm, applied)
        if applied:
            super().step(closure)

    def _clip(self) -> float:
        params = [p for group in self.param_groups for p in group["params"]]
        bound = math.inf if self.rules.grad_clip is None else self.rules.grad_clip
        return float(nn.utils.clip_grad_norm_(params, bound))


class TrainingEngine(Protocol):
    """Parameters, gradients and optimiser of one learner.

    Reading and writing parameters and states are collective calls: every learner must
    make them, in the same order.
    """

    optimizer: GuardedAdamW
    is_first: bool
    """Whether this learner keeps what `optimizer_state` collects from all."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the policy."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Adds the gradients of `loss`, summed over all learners.

        Args:
            loss: scalar, already divided by its global denominator.
            is_last: whether `step` follows.
        """

    def step(self) -> StepResult:
        """Makes the update and clears the gradients."""

    def whole(
        self, tensors: Sequence[Tensor], *, modify: bool = False
    ) -> AbstractContextManager[None]:
        """Holds these parameters as a whole inside the context.

        Args:
            tensors: parameters, and buffers, which are whole anyway.
            modify: keep what is written to them inside the context.
        """

    def read(self, tensor: Tensor) -> Tensor:
        """Returns a whole parameter, float32 if it is trained."""

    def write(self, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets parameters, each to a whole value."""

    def optimizer_state(self) -> OptimizerState:
        """Returns the optimiser's state on the first learner; empty on the others."""

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Sets the optimiser's state."""

    def close(self) -> None:
        """Releases process-wide resources."""


class WholeParameters:
    """Access to parameters that are not sharded."""

    is_first = True

    def whole(
        self, tensors: Sequence[Tensor], *, modify: bool = False
    ) -> AbstractContextManager[None]:
        """Does nothing: the parameters are whole."""
        del tensors, modify
        return nullcontext()

    def read(self, tensor: Tensor) -> Tensor:
        """Returns the parameter."""
        return tensor.detach()

    @torch.no_grad()
    def write(self, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets parameters."""
        for tensor, value in values:
            tensor.copy_(value)


class TorchEngine(WholeParameters):
    """Plain PyTorch, one process.

    Args:
        policy: the module to train; its trainable parameters become float32.
        lr: learning rate.
        rules: the update rules.
        dtype: of the forward pass.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        lr: float,
        rules: UpdateRules,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._policy = policy
        self._dtype = dtype
        self._trained = trained_parameters(policy)
        keep_in_float32(self._trained.values())
        self.optimizer = GuardedAdamW(self._trained.values(), rules, lr=lr)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the policy."""
        with mixed_precision(self._policy, self._dtype):
            return self._policy(*args, **kwargs)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Adds the gradients of `loss`."""
        del is_last
        loss.backward()

    def step(self) -> StepResult:
        """Makes the update and clears the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.optimizer.last_result

    def optimizer_state(self) -> OptimizerState:
        """Returns the optimiser's state."""
        return read_adam_state(self.optimizer, self._trained)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Sets the optimiser's state."""
        write_adam_state(self.optimizer, self._trained, state)

    def close(self) -> None:
        """Nothing to release."""


def trained_parameters(policy: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are trained, by name, tied ones once."""
    return {n: p for n, p in policy.named_parameters() if p.requires_grad}


def keep_in_float32(parameters: Iterable[nn.Parameter]) -> None:
    """Makes parameters float32: in bfloat16, an update below 1/256 of them is lost."""
    for parameter in parameters:
        parameter.data = parameter.data.float()


def mixed_precision(
    policy: nn.Module, dtype: torch.dtype
) -> AbstractContextManager[Any]:
    """Runs matrix products on float32 parameters in `dtype`."""
    device = next(policy.parameters()).device.type
    return torch.autocast(device, dtype, enabled=dtype != torch.float32)


def read_adam_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> OptimizerState:
    """Copies AdamW's state of unsharded parameters to the CPU."""
    return {
        name: {
            key: optimizer.state[parameter][key].cpu().clone()
            for key in ("step", *MOMENTS)
        }
        for name, parameter in parameters.items()
        if parameter in optimizer.state
    }


def write_adam_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: OptimizerState,
) -> None:
    """Sets AdamW's state of unsharded parameters.

    Raises:
        ValueError: if the state is of other parameters.
    """
    check_names(state, parameters)
    optimizer.state.clear()
    for name, saved in state.items():
        parameter = parameters[name]
        moments = {k: saved[k].to(parameter.device, copy=True) for k in MOMENTS}
        optimizer.state[parameter] = {"step": saved["step"].clone(), **moments}


def check_names(state: OptimizerState, parameters: Mapping[str, Any]) -> None:
    """Checks that an optimiser state fits the parameters that are trained.

    Raises:
        ValueError: if it holds none of them, or others.
    """
    others = sorted(set(state) - set(parameters))
    if others:
        raise ValueError(
            f"The checkpoint holds the optimiser state of {len(others)} parameters "
            f"that are not trained here, such as {others[0]!r}. Restore it with the "
            "same `model_name_or_path` and `lora_config`, or restore only its weights: "
            "CHECKPOINT/learner_group/learner/rl_module with "
            "component='learner_group/learner/rl_module'."
        )
