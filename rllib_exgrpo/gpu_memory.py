"""Whether an engine and a learner fit on one GPU, estimated before they start.

Not run on a GPU. Activations are left out: they depend on
`max_tokens_per_micro_batch` and `gradient_checkpointing`, and the sleeping engine makes
room for them.
"""

from typing import NamedTuple

from torch import nn

_GIB = 2**30
_AT_REST = 12
"""Bytes of a trained parameter between updates: itself and AdamW's moments, float32."""
_IN_UPDATE = 16
"""The same and its gradient."""


class LearnerMemory(NamedTuple):
    """Estimated bytes of a learner that is not sharded.

    Attributes:
        at_rest: while the engine samples.
        in_update: while the engine sleeps.
    """

    at_rest: int
    in_update: int


def learner_memory(model: nn.Module) -> LearnerMemory:
    """Estimates what training a model takes; frozen parameters keep their precision.

    Args:
        model: it may be without weights, on the meta device.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(
        p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad
    )
    return LearnerMemory(_AT_REST * trained + frozen, _IN_UPDATE * trained + frozen)


def check_shared_gpu(
    memory: LearnerMemory, *, gpu_bytes: int, gpu_memory_utilization: float
) -> None:
    """Checks that engine and learner fit on one GPU together.

    Args:
        memory: of the learner.
        gpu_bytes: of the whole GPU.
        gpu_memory_utilization: the engine's share of it.

    Raises:
        ValueError: if they do not, with the numbers and the ways out.
    """
    engine = gpu_memory_utilization * gpu_bytes
    if engine + memory.at_rest <= gpu_bytes and memory.in_update <= gpu_bytes:
        return
    fits = max(0.0, 1 - memory.at_rest / gpu_bytes)
    raise ValueError(
        f"`gpu_memory_utilization`={gpu_memory_utilization} gives the engine "
        f"{engine / _GIB:.1f} of the GPU's {gpu_bytes / _GIB:.1f} GiB, and the learner "
        f"needs an estimated {memory.at_rest / _GIB:.1f} GiB beside it and "
        f"{memory.in_update / _GIB:.1f} GiB in an update, activations not counted. "
        f"Lower `gpu_memory_utilization` below {fits:.2f}, train adapters "
        "(`lora_config`), or give engine and learner GPUs of their own "
        "(`num_env_runners`, `num_learners`)."
    )
