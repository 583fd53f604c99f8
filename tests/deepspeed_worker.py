"""One rank of the DeepSpeed tests: trains a small model through the engine.

Run as `deepspeed_worker.py RANK WORLD_SIZE INIT_FILE OUT_DIR`; writes what it computed
for every ZeRO stage.
"""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist

from rllib_exgrpo.deepspeed_engine import DeepSpeedEngine
from rllib_exgrpo.training_engine import UpdateRules

# Parameters as small as the test model's would otherwise stay whole in stage 3.
PARTITION_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    )


def make_batches(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Five ragged pieces of 24 rows; their sizes do not divide evenly over ranks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 6, generator=generator)
    y = torch.randn(24, 3, generator=generator)
    return list(zip(x.split([7, 2, 9, 1, 5]), y.split([7, 2, 9, 1, 5]), strict=True))


def piece_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum() / 24  # a denominator over all pieces


def train(engine, rank: int, world_size: int, updates: range) -> list[float]:
    norms = []
    for update in updates:
        batches = make_batches(update)
        own = batches[rank::world_size]
        most = len(batches[::world_size])
        # Ranks with fewer pieces make up with one that counts nothing.
        own += [(torch.zeros(1, 6), None)] * (most - len(own))
        for index, (x, y) in enumerate(own):
            output = engine.forward(x)
            loss = output.sum() * 0 if y is None else piece_loss(output, y)
            engine.backward(loss, is_last=index == most - 1)
        norms.append(engine.step().grad_norm)
    return norms


def full_parameters(engine, model) -> np.ndarray:
    with engine.gathered():
        return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def build(stage: int, rules: UpdateRules) -> tuple[DeepSpeedEngine, torch.nn.Module]:
    model = make_model()
    engine = DeepSpeedEngine(
        model,
        lr=1e-2,
        rules=rules,
        zero_stage=stage,
        deepspeed_config=PARTITION_ALL if stage == 3 else {},
        device=torch.device("cpu"),
    )
    return engine, model


def run_stage(stage: int, rank: int, world_size: int) -> dict[str, np.ndarray]:
    rules = UpdateRules(grad_clip=0.5, skip_above_norm=500.0)
    engine, model = build(stage, rules)
    result = {"partitioned": np.array(sum(p.numel() for p in model.parameters()))}
    result["norms"] = np.array(train(engine, rank, world_size, range(3)))
    result["parameters"] = full_parameters(engine, model).copy()

    # Save, go astray, come back, go on: as if nothing had happened.
    shards: list[dict] = [None] * world_size
    dist.all_gather_object(shards, engine.optimizer_state())
    with engine.gathered():
        weights = {k: v.clone() for k, v in model.state_dict().items()}
    train(engine, rank, world_size, range(3, 5))
    result["continued"] = full_parameters(engine, model).copy()
    train(engine, rank, world_size, range(7, 9))
    with engine.gathered(modify=True):
        model.load_state_dict(weights)
    engine.load_optimizer_state(shards)
    train(engine, rank, world_size, range(3, 5))
    result["restored"] = full_parameters(engine, model).copy()

    # Weights set from outside must survive the next step.
    with engine.gathered(modify=True):
        model.load_state_dict({k: torch.ones_like(v) for k, v in weights.items()})
    engine.optimizer.param_groups[0]["lr"] = 0.0
    train(engine, rank, world_size, range(1))
    result["set"] = full_parameters(engine, model).copy()

    # An update that breaks the rules is not made.
    engine.optimizer.rules = UpdateRules(grad_clip=0.5, skip_above_norm=1e-6)
    engine.optimizer.param_groups[0]["lr"] = 1e-2
    train(engine, rank, world_size, range(1))
    result["applied"] = np.array(engine.optimizer.last_result.applied)
    result["skipped"] = full_parameters(engine, model).copy()
    engine.optimizer.rules = rules
    engine.backward(engine.forward(torch.full((1, 6), torch.nan)).sum(), is_last=True)
    result["nan_applied"] = np.array(engine.step().applied)
    result["after_nan"] = full_parameters(engine, model).copy()
    engine.close()
    return result


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size
    )
    for stage in range(4):
        result = run_stage(stage, rank, world_size)
        np.savez(Path(sys.argv[4]) / f"stage{stage}_rank{rank}.npz", **result)


if __name__ == "__main__":
    main()
