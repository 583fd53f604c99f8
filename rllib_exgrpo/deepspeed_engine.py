"""The training engine on DeepSpeed: the only module that imports it."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rllib_exgrpo.training_engine import (
    MOMENTS,
    GuardedAdamW,
    OptimizerState,
    StepResult,
    UpdateRules,
    check_names,
    keep_in_float32,
    mixed_precision,
    read_adam_state,
    trained_parameters,
    write_adam_state,
)


def build_config(
    zero_stage: int,
    *,
    grad_clip: float | None,
    dtype: torch.dtype,
    num_parameters: int,
    on_gpu: bool,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Builds the DeepSpeed config.

    Args:
        zero_stage: 0 to 3.
        grad_clip: largest gradient norm, None for no clipping.
        dtype: of the parameters outside of the optimiser.
        num_parameters: of the whole model; buckets larger than it only cost memory.
        on_gpu: whether communication can overlap with computation.
        overrides: the user's DeepSpeed config, which `config_checks` has checked; its
            `zero_optimization` is merged.
    """
    # DeepSpeed wants a multiple of its alignment, which is small and even.
    bucket = int(min(5e8, -(-num_parameters // 1024) * 1024))
    low_precision = {
        "bf16": {"enabled": True},
        # Micro-batches add up in float32, so that their number does not matter.
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Stage 0 leaves clipping to the optimiser, which then also knows the norm.
        "gradient_clipping": (grad_clip or 0.0) if zero_stage > 0 else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **(low_precision if dtype != torch.float32 else {}),
        **overrides,
        "zero_optimization": {
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": on_gpu,
            **overrides.get("zero_optimization", {}),
            "stage": zero_stage,
        },
    }


class DeepSpeedEngine:
    """A policy on DeepSpeed, sharded over the learners by ZeRO stage.

    A process group must exist already if there is more than one learner (Ray's learner
    group creates it); with one learner DeepSpeed creates its own.

    In bfloat16, stage 0 works as `TorchEngine` does, on float32 parameters. The others
    keep the parameters in bfloat16 and float32 copies of them in the optimiser.

    Args:
        policy: the module to train.
        lr: learning rate.
        rules: the update rules.
        zero_stage: 0 to 3.
        deepspeed_config: the user's additions.
        device: where the policy lives.
        dtype: of the forward pass.
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
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._set_rank_variables(device)
        import deepspeed

        self._deepspeed = deepspeed
        self._zero_stage = zero_stage
        self._dtype = dtype
        self._trained = trained_parameters(policy)
        if zero_stage == 0:
            keep_in_float32(self._trained.values())
        self.optimizer = GuardedAdamW(self._trained.values(), rules, lr=lr)
        config = build_config(
            zero_stage,
            grad_clip=rules.grad_clip,
            dtype=dtype if zero_stage > 0 else torch.float32,
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
        self.is_first = torch.distributed.get_rank() == 0

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
        if self._zero_stage > 0:
            return self._engine(*args, **kwargs)
        with mixed_precision(self._engine.module, self._dtype):
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
    def whole(
        self, tensors: Sequence[Tensor], *, modify: bool = False
    ) -> Iterator[None]:
        """Holds these parameters as a whole inside the context."""
        sharded = [t for t in tensors if hasattr(t, "ds_id")]
        with self._deepspeed.zero.GatheredParameters(
            sharded, modifier_rank=0 if modify else None, enabled=bool(sharded)
        ):
            yield

    @property
    def _has_float32_copies(self) -> bool:
        return self._zero_stage > 0 and self._dtype != torch.float32

    def read(self, tensor: Tensor) -> Tensor:
        """Returns a whole parameter, float32 if it is trained."""
        if self._has_float32_copies and tensor.requires_grad:
            return self._deepspeed.utils.safe_get_full_fp32_param(tensor)
        if not hasattr(tensor, "ds_id"):
            return tensor.detach()
        with self.whole([tensor]):
            return tensor.detach().clone()

    @torch.no_grad()
    def write(self, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets parameters, each to a whole value."""
        values = list(values)
        for tensor, value in values:
            with self.whole([tensor], modify=True):
                tensor.copy_(value)
        if self._zero_stage > 0:
            # Otherwise the next step would start from the old float32 shards.
            self._engine.optimizer.refresh_fp32_params()
        if self._has_float32_copies:
            for tensor, value in values:
                if tensor.requires_grad:
                    self._write_shard(tensor, value.float())

    def _write_shard(self, parameter: Any, value: Tensor, *moment: str) -> None:
        """Sets this learner's float32 shard of a parameter, or of one of its moments.

        Args:
            parameter: which one, with what DeepSpeed attaches to it.
            value: of the whole parameter.
            moment: its key; none for the parameter itself.
        """
        utils = self._deepspeed.utils
        if self._zero_stage < 3:
            parameter.set_full_hp_param(value, *moment)
            return
        # DeepSpeed's own setter of whole values fails where shards are padded.
        size = parameter.ds_tensor.numel()
        padded = pad(value.flatten(), (0, size * self.world_size - value.numel()))
        shard = padded.split(size)[torch.distributed.get_rank()]
        if moment:
            utils.safe_set_local_optimizer_state(parameter, shard, *moment)
        else:
            utils.safe_set_local_fp32_param(parameter, shard)

    def optimizer_state(self) -> OptimizerState:
        """Returns the optimiser's state on the first learner; empty on the others."""
        if self._zero_stage == 0:
            state = read_adam_state(self.optimizer, self._trained)
            return state if self.is_first else {}
        if not self.optimizer.state:
            return {}
        step = next(iter(self.optimizer.state.values()))["step"]
        read = self._deepspeed.utils.safe_get_full_optimizer_state
        collected = {}
        for name, parameter in self._trained.items():
            moments = {key: read(parameter, key) for key in MOMENTS}
            if self.is_first:
                on_cpu = {key: value.cpu() for key, value in moments.items()}
                collected[name] = {"step": step.cpu().clone(), **on_cpu}
        return collected

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Sets this learner's share of the optimiser's state."""
        if self._zero_stage == 0:
            write_adam_state(self.optimizer, self._trained, state)
            return
        check_names(state, self._trained)
        step = next(iter(state.values()))["step"] if state else torch.tensor(0.0)
        for shard in self._float32_shards():
            own = self.optimizer.state[shard]
            own["step"] = step.clone()
            for key in MOMENTS:
                own.setdefault(key, torch.zeros_like(shard)).zero_()
        if self._zero_stage < 3:  # which else does so after its first step
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, saved in state.items():
            for key in MOMENTS:
                self._write_shard(self._trained[name], saved[key], key)

    def _float32_shards(self) -> list[Tensor]:
        """Returns the flat tensors that the optimiser works on."""
        if self._zero_stage == 3:
            return self._engine.optimizer.fp32_partitioned_groups_flat
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def close(self) -> None:
        """Forgets process groups, so that the process can build another engine."""
        from deepspeed.utils import groups

        self._engine.destroy()
        groups._release_process_group_references(group=None)
        self._deepspeed.comm.comm.cdb = None
