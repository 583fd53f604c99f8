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
from rllib_exgrpo.training_engine import TorchEngine, UpdateRules

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
    return [update_on(engine, rank, world_size, make_batches(u)) for u in updates]


def update_on(engine, rank: int, world_size: int, batches, scale: float = 1.0) -> float:
    """Makes one update on pieces dealt out to the ranks; returns the gradient norm."""
    own = batches[rank::world_size]
    most = len(batches[::world_size])
    # Ranks with fewer pieces make up with one that counts nothing.
    own += [(torch.zeros(1, 6), None)] * (most - len(own))
    for index, (x, y) in enumerate(own):
        output = engine.forward(x.to(engine_dtype(engine))).float()
        loss = output.sum() * 0 if y is None else scale * piece_loss(output, y)
        engine.backward(loss, is_last=index == most - 1)
    return engine.step().grad_norm


def engine_dtype(engine) -> torch.dtype:
    """What the first layer takes; a language model's takes token ids instead."""
    return torch.bfloat16 if engine._has_float32_copies else torch.float32


def full_parameters(engine, model) -> np.ndarray:
    values = [engine.read(p).flatten() for p in model.parameters()]
    return torch.cat(values).numpy().copy()


def weights_of(engine, model) -> dict[str, torch.Tensor]:
    return {name: engine.read(p).clone() for name, p in model.named_parameters()}


def set_weights(engine, model, weights) -> None:
    engine.write((p, weights[name]) for name, p in model.named_parameters())


def build(
    stage: int, rules: UpdateRules, *, lr=1e-2, dtype=torch.float32, **zero
) -> tuple[DeepSpeedEngine, torch.nn.Module]:
    model = make_model()
    settings = {**(PARTITION_ALL["zero_optimization"] if stage == 3 else {}), **zero}
    engine = DeepSpeedEngine(
        model,
        lr=lr,
        rules=rules,
        zero_stage=stage,
        deepspeed_config={"zero_optimization": settings},
        device=torch.device("cpu"),
        dtype=dtype,
    )
    return engine, model


def run_stage(stage: int, rank: int, world_size: int, out: Path) -> dict:
    rules = UpdateRules(grad_clip=0.5, skip_above_norm=500.0)
    engine, model = build(stage, rules)
    result = {"partitioned": np.array(sum(p.numel() for p in model.parameters()))}
    result["norms"] = np.array(train(engine, rank, world_size, range(3)))
    result["parameters"] = full_parameters(engine, model)

    # Save, go astray, come back, go on: as if nothing had happened.
    weights = weights_of(engine, model)
    states = [dict(engine.optimizer_state())]
    if rank == 0:
        saved = {"weights": weights, "optimizer": states[0]}
        torch.save(saved, out / f"state{stage}.pt")
    dist.broadcast_object_list(states)
    train(engine, rank, world_size, range(3, 5))
    result["continued"] = full_parameters(engine, model)
    train(engine, rank, world_size, range(7, 9))
    set_weights(engine, model, weights)
    engine.load_optimizer_state(states[0])
    train(engine, rank, world_size, range(3, 5))
    result["restored"] = full_parameters(engine, model)

    # One gathered parameter at a time.
    result["peak"] = np.array(peak_of_reading(engine, model))

    # Weights set from outside must survive the next step.
    set_weights(engine, model, {k: torch.ones_like(v) for k, v in weights.items()})
    engine.optimizer.param_groups[0]["lr"] = 0.0
    train(engine, rank, world_size, range(1))
    result["set"] = full_parameters(engine, model)

    # An update that breaks the rules is not made.
    engine.optimizer.rules = UpdateRules(grad_clip=0.5, skip_above_norm=1e-6)
    engine.optimizer.param_groups[0]["lr"] = 1e-2
    train(engine, rank, world_size, range(1))
    result["applied"] = np.array(engine.optimizer.last_result.applied)
    result["skipped"] = full_parameters(engine, model)
    engine.optimizer.rules = rules
    engine.backward(engine.forward(torch.full((1, 6), torch.nan)).sum(), is_last=True)
    result["nan_applied"] = np.array(engine.step().applied)
    result["after_nan"] = full_parameters(engine, model)
    engine.close()
    return result


def peak_of_reading(engine, model) -> int:
    """Returns the most parameters that are whole at once while all are read."""
    peak = 0
    for parameter in model.parameters():
        with engine.whole([parameter]):
            peak = max(peak, sum(p.numel() for p in model.parameters()))
    return peak


def continue_from_torch(stage: int, rank: int, world_size: int) -> dict:
    """Goes on in a fresh engine with what one process of plain PyTorch left."""
    rules = UpdateRules(grad_clip=0.5)
    plain_model = make_model()
    plain = TorchEngine(plain_model, lr=1e-2, rules=rules)
    for update in range(3):
        for x, y in make_batches(update):
            plain.backward(piece_loss(plain.forward(x), y), is_last=False)
        plain.step()
    engine, model = build(stage, rules)
    set_weights(engine, model, weights_of(plain, plain_model))
    engine.load_optimizer_state(plain.optimizer_state())
    train(engine, rank, world_size, range(3, 5))
    result = {"from_torch": full_parameters(engine, model)}
    engine.close()
    return result


def accumulate(stage: int, rank: int, world_size: int) -> dict:
    """Makes the same update on 8 rows cut into 1, 2, 4 and 8 micro-batches."""
    engine, model = build(stage, UpdateRules(grad_clip=None))
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(8, n, generator=generator) for n in (6, 3))
    start, norms, parameters = weights_of(engine, model), [], []
    for size in (8, 4, 2, 1):
        set_weights(engine, model, start)
        engine.load_optimizer_state({})
        pieces = list(zip(x.split(size), y.split(size), strict=True))
        norms.append(update_on(engine, rank, world_size, pieces))
        parameters.append(full_parameters(engine, model))
    engine.close()
    return {"cut_norms": np.array(norms), "cut_parameters": np.array(parameters)}


def clip(stage: int, rank: int, world_size: int) -> dict:
    """Makes an update that is the clipped gradient, as plain SGD with lr 1 would.

    Without momentum AdamW moves by lr g / (|g| + eps), which is g for a huge eps = lr.
    """
    rules = UpdateRules(
        grad_clip=1.0, betas=(0.0, 0.0), eps=1e6, weight_decay=0.0, skip_above_norm=None
    )
    engine, model = build(stage, rules, lr=1e6)
    before = full_parameters(engine, model)
    norm = update_on(engine, rank, world_size, make_batches(), scale=1000.0)
    change = np.linalg.norm(full_parameters(engine, model) - before)
    engine.close()
    return {"norm_before_clipping": np.array(norm), "clipped_change": np.array(change)}


def low_precision(stage: int, rank: int, world_size: int) -> dict:
    """Makes 50 updates of 1e-6 on weights near 1, where bfloat16 has steps of 2^-8."""
    rules = UpdateRules(grad_clip=None, weight_decay=0.0, betas=(0.0, 0.0))
    engine, model = build(stage, rules, lr=1e-6, dtype=torch.bfloat16)
    exact = {
        n: torch.full(p.shape, 1.001) for n, p in weights_of(engine, model).items()
    }
    set_weights(engine, model, exact)
    result = {"bf16_written": full_parameters(engine, model)}
    x = torch.ones(2, 6, dtype=engine_dtype(engine))
    for _ in range(50):
        engine.backward(engine.forward(x).float().sum(), is_last=True)
        engine.step()
    result["bf16_trained"] = full_parameters(engine, model)
    engine.close()
    return result


def offload(stage: int, rank: int, world_size: int) -> dict:
    if stage == 0:
        return {}
    zero = {"offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    engine, model = build(stage, UpdateRules(grad_clip=0.5), **zero)
    norms = train(engine, rank, world_size, range(3))
    result = {"offloaded": full_parameters(engine, model)}
    result["offloaded_norms"] = np.array(norms)
    engine.close()
    return result


def main() -> None:
    rank, world_size, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4])
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size
    )
    for stage in range(4):
        result = run_stage(stage, rank, world_size, out)
        for part in (continue_from_torch, accumulate, clip, low_precision, offload):
            result |= part(stage, rank, world_size)
        np.savez(out / f"stage{stage}_rank{rank}.npz", **result)


if __name__ == "__main__":
    main()
