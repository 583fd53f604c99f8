"""What the learner needs of whatever holds parameters, gradients and optimiser.

`TorchEngine` is plain PyTorch in one process; `deepspeed_engine.DeepSpeedEngine` does
the same for parameters that are sharded over learners. Both obey the same rules:
gradients of `backward` add up until `step`; the gradient norm is clipped; an update
whose norm is not finite or above a bound is skipped.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


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
    """Parameters, gradients and optimiser of one learner."""

    optimizer: GuardedAdamW

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

    def gathered(self, *, modify: bool = False) -> AbstractContextManager[None]:
        """Holds whole parameters inside the context; every learner must enter it.

        Args:
            modify: keep what is written to the parameters inside the context.
        """

    def optimizer_state(self) -> dict[str, Any]:
        """Returns this learner's share of the optimiser state."""

    def load_optimizer_state(self, states: list[dict[str, Any]]) -> None:
        """Sets the optimiser state from the shares of all learners, in order."""

    def close(self) -> None:
        """Releases process-wide resources."""


class TorchEngine:
    """Plain PyTorch, one process.

    Args:
        policy: the module to train.
        lr: learning rate.
        rules: the update rules.
    """

    def __init__(self, policy: nn.Module, *, lr: float, rules: UpdateRules) -> None:
        self._policy = policy
        params = [p for p in policy.parameters() if p.requires_grad]
        self.optimizer = GuardedAdamW(params, rules, lr=lr)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the policy."""
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

    def gathered(self, *, modify: bool = False) -> AbstractContextManager[None]:
        """Does nothing: the parameters are whole."""
        del modify
        return nullcontext()

    def optimizer_state(self) -> dict[str, Any]:
        """Returns the optimiser state."""
        return self.optimizer.state_dict()

    def load_optimizer_state(self, states: list[dict[str, Any]]) -> None:
        """Sets the optimiser state."""
        self.optimizer.load_state_dict(states[0])

    def close(self) -> None:
        """Nothing to release."""
