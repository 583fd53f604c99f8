"""The training engine on DeepSpeed: the only module that imports it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rllib_exgrpo.training_engine import GuardedAdamW, StepResult, UpdateRules

OWNED_KEYS = {
    "optimizer": "`lr`, `adam_betas`, `weight_decay`",
    "scheduler": "`lr` (RLlib's schedules)",
    "gradient_clipping": "`grad_clip`",
    "train_batch_size": "`prompts_per_update` and `group_size`",
    "train_micro_batch_size_per_gpu": "`max_tokens_per_micro_batch`",
    "gradient_accumulation_steps": "`max_tokens_per_micro_batch`",
    "bf16": "`model_dtype`",
    "fp16": "`model_dtype`",
}
"""Settings of a DeepSpeed config that this package sets, and the knob for each."""


def build_config(
    zero_stage: int,
    *,
    grad_clip: float | None,
    num_parameters: int,
    on_gpu: bool,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Builds the DeepSpeed config.

    Args:
        zero_stage: 0 to 3.
        grad_clip: largest gradient norm, None for no clipping.
        num_parameters: of the whole model; buckets larger than it only cost memory.
        on_gpu: whether communication can overlap with computation.
        overrides: the user's DeepSpeed config; its `zero_optimization` is merged.

    Raises:
        ValueError: if it sets something that a knob of this package sets.
    """
    for key, knob in OWNED_KEYS.items():
        if key in overrides:
            raise ValueError(
                f"`deepspeed_config` sets {key!r}={overrides[key]!r}, which {knob} "
                f"controls. Remove {key!r} from `deepspeed_config`."
            )
    # DeepSpeed wants a multiple of its alignment, which is small and even.
    bucket = int(min(5e8, -(-num_parameters // 1024) * 1024))
    zero = {
        "stage": zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": on_gpu,
        **dict(overrides.get("zero_optimization", {})),
    }
    if zero["stage"] != zero_stage:
        raise ValueError(
            f"`deepspeed_config` asks for ZeRO stage {zero['stage']} and `zero_stage` "
            f"for {zero_stage}. Set only `zero_stage`."
        )
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Stage 0 leaves clipping to the optimiser, which then also knows the norm.
        "gradient_clipping": (grad_clip or 0.0) if zero_stage > 0 else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **overrides,
        "zero_optimization": zero,
    }


class DeepSpeedEngine:
    """A policy on DeepSpeed, sharded over the learners by ZeRO stage.

    A process group must exist already if there is more than one learner (Ray's learner
    group creates it); with one learner DeepSpeed creates its own.

    Args:
        policy: the module to train.
        lr: learning rate.
        rules: the update rules.
        zero_stage: 0 to 3.
        deepspeed_config: the user's additions.
        device: where the policy lives.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        lr: float,
        rules: UpdateRules,
        zero_stage: int,
        deepspeed_config: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self._set_rank_variables(device)
        import deepspeed

        self._deepspeed = deepspeed
        self._zero_stage = zero_stage
        self.optimizer = GuardedAdamW(
            [p for p in policy.parameters() if p.requires_grad], rules, lr=lr
        )
        config = build_config(
            zero_stage,
            grad_clip=rules.grad_clip,
            num_parameters=sum(p.numel() for p in policy.parameters()),
            on_gpu=device.type == "cuda",
            overrides=deepspeed_config,
        )
        self._owns_process_group = not torch.distributed.is_initialized()
        self._engine, *_ = deepspeed.initialize(
            model=policy,
            optimizer=self.optimizer,
            config=config,
            dist_init_required=self._owns_process_group,
        )
        if zero_stage > 0:
            zero = self._engine.optimizer
            self.optimizer.norm_of_shards = lambda: float(zero._global_grad_norm)
        self.world_size = torch.distributed.get_world_size()

    @staticmethod
    def _set_rank_variables(device: torch.device) -> None:
        """Sets what DeepSpeed reads from the environment; Ray sets only part of it."""
        initialized = torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if initialized else 0
        size = torch.distributed.get_world_size() if initialized else 1
        os.environ["RANK"] = str(rank)
        os.environ["LOCAL_RANK"] = str(device.index or 0)
        os.environ["WORLD_SIZE"] = str(size)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        if device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the policy; under ZeRO-3 a collective call."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Adds the gradients of `loss`, summed over all learners."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed averages over learners; the denominators are global already.
        self._engine.backward(loss * self.world_size, scale_wrt_gas=False)

    def step(self) -> StepResult:
        """Makes the update and clears the gradients."""
        overflowed = StepResult(grad_norm=float("inf"), applied=False)
        self.optimizer.last_result = overflowed  # stays if DeepSpeed skips by itself
        self._engine.step()
        return self.optimizer.last_result

    @contextmanager
    def gathered(self, *, modify: bool = False) -> Iterator[None]:
        """Holds whole parameters inside the context; every learner must enter it."""
        params = list(self._engine.module.parameters())
        rank = 0 if modify else None
        with self._deepspeed.zero.GatheredParameters(
            params, modifier_rank=rank, enabled=self._zero_stage == 3
        ):
            yield
        if modify and self._zero_stage > 0:
            # Otherwise the next step would start from the old float32 shards.
            self._engine.optimizer.refresh_fp32_params()

    def optimizer_state(self) -> dict[str, Any]:
        """Returns this learner's shard of the optimiser state."""
        return self._engine.optimizer.state_dict()

    def load_optimizer_state(self, states: list[dict[str, Any]]) -> None:
        """Sets the optimiser state from the shards of all learners."""
        optimizer = self._engine.optimizer
        if self._zero_stage == 0:
            optimizer.load_state_dict(states[0])
        elif self._zero_stage == 3:
            optimizer.load_state_dict(
                states, load_optimizer_states=True, load_from_fp32_weights=True
            )
        else:
            optimizer.load_state_dict(states, load_optimizer_states=True)

    def close(self) -> None:
        """Forgets process groups, so that the process can build another engine."""
        from deepspeed.utils import groups

        self._engine.destroy()
        groups._release_process_group_references(group=None)
        self._deepspeed.comm.comm.cdb = None
