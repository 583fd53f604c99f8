import subprocess
import sys
from pathlib import Path

import deepspeed_worker as worker
import numpy as np
import pytest
import torch

from rllib_exgrpo.deepspeed_engine import build_config
from rllib_exgrpo.training_engine import TorchEngine, UpdateRules


@pytest.fixture(scope="module", params=[1, 2], ids=["1 process", "2 processes"])
def out(request, tmp_path_factory):
    """The folder with what each rank computed at each ZeRO stage."""
    out, size = tmp_path_factory.mktemp("deepspeed"), request.param
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                worker.__file__,
                str(r),
                str(size),
                str(out / "init"),
                out,
            ],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(size)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output[-4000:]
    return out


@pytest.fixture(scope="module")
def sharded_results(out):
    """What each rank computed, by stage."""
    return [
        [np.load(file) for file in sorted(out.glob(f"stage{stage}_rank*.npz"))]
        for stage in range(4)
    ]


def plain_training(num_updates):
    """Reference: PyTorch's AdamW and clipping on the whole batch at once."""
    model = worker.make_model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01
    )
    norms = []
    for update in range(num_updates):
        loss = sum(
            worker.piece_loss(model(x), y) for x, y in worker.make_batches(update)
        )
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy(), norms


@pytest.mark.parametrize("stage", range(4))
def test_every_zero_stage_trains_like_plain_pytorch(sharded_results, stage):
    expected, norms = plain_training(3)
    continued, _ = plain_training(5)
    for result in sharded_results[stage]:
        np.testing.assert_allclose(result["parameters"], expected, atol=2e-6)
        np.testing.assert_allclose(result["norms"], norms, rtol=1e-5)
        np.testing.assert_allclose(result["continued"], continued, atol=2e-6)


@pytest.mark.parametrize("stage", range(4))
def test_restored_state_continues_bit_identically(sharded_results, stage):
    for result in sharded_results[stage]:
        np.testing.assert_array_equal(result["restored"], result["continued"])


@pytest.mark.parametrize("stage", range(4))
def test_weights_that_were_set_survive_a_step(sharded_results, stage):
    for result in sharded_results[stage]:
        np.testing.assert_array_equal(result["set"], 1.0)


@pytest.mark.parametrize("stage", range(4))
def test_updates_that_break_the_rules_are_skipped(sharded_results, stage):
    for result in sharded_results[stage]:
        assert not result["applied"]
        assert not result["nan_applied"]
        np.testing.assert_array_equal(result["skipped"], result["set"])
        np.testing.assert_array_equal(result["after_nan"], result["set"])


def test_stage_3_really_partitions(sharded_results):
    whole = sum(p.numel() for p in worker.make_model().parameters())
    for stage in range(4):
        for result in sharded_results[stage]:
            # Outside of `gathered` a partitioned parameter is an empty tensor.
            assert result["partitioned"] == (0 if stage == 3 else whole)


def test_the_torch_engine_trains_like_plain_pytorch():
    model = worker.make_model()
    engine = TorchEngine(model, lr=1e-2, rules=UpdateRules(grad_clip=0.5))
    norms = []
    for update in range(3):
        for x, y in worker.make_batches(update):
            engine.backward(worker.piece_loss(engine.forward(x), y), is_last=False)
        norms.append(engine.step().grad_norm)
    expected, expected_norms = plain_training(3)
    np.testing.assert_allclose(
        worker.full_parameters(engine, model), expected, atol=1e-7
    )
    assert norms == pytest.approx(expected_norms)


def test_clipping_bounds_the_update_and_reports_the_norm_before():
    # One linear weight, gradient 100, no Adam: check the gradient itself.
    model = torch.nn.Linear(1, 1, bias=False)
    engine = TorchEngine(model, lr=0.0, rules=UpdateRules(grad_clip=1.0))
    engine.backward(100 * model(torch.ones(1, 1)).sum(), is_last=True)
    engine.optimizer.step()
    norm = engine.optimizer.last_result.grad_norm
    assert norm == pytest.approx(100)
    assert engine.optimizer.rules.clips(norm)  # what `grad_clip_fraction` counts
    assert not engine.optimizer.rules.clips(1.0)
    assert not UpdateRules(grad_clip=None).clips(norm)
    assert model.weight.grad.item() == pytest.approx(1.0, rel=1e-4)


# bug report 35
def test_reading_gathers_one_parameter_at_a_time(sharded_results):
    sizes = [p.numel() for p in worker.make_model().parameters()]
    for stage in range(4):
        for result in sharded_results[stage]:
            assert result["peak"] == (max(sizes) if stage == 3 else sum(sizes))


# bug report 36
@pytest.mark.parametrize("stage", range(4))
def test_the_number_of_micro_batches_does_not_change_the_update(sharded_results, stage):
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(8, n, generator=generator) for n in (6, 3))
    model = worker.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    worker.piece_loss(model(x), y).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    for result in sharded_results[stage]:
        np.testing.assert_allclose(result["cut_norms"], [float(norm)] * 4, rtol=1e-5)
        for parameters in result["cut_parameters"]:
            np.testing.assert_allclose(parameters, expected, atol=1e-5)


# bug report 37
@pytest.mark.parametrize("stage", range(4))
def test_clipping_bounds_the_update_at_every_stage(sharded_results, stage):
    model = worker.make_model()
    loss = sum(worker.piece_loss(model(x), y) for x, y in worker.make_batches())
    (1000 * loss).backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    assert norm > 100
    for result in sharded_results[stage]:
        assert result["norm_before_clipping"] == pytest.approx(norm, rel=1e-4)
        assert result["clipped_change"] == pytest.approx(1.0, rel=1e-3)


# bug report 38
@pytest.mark.parametrize("stage", range(4))
def test_one_process_continues_from_the_state_of_any_number(out, stage):
    saved = torch.load(out / f"state{stage}.pt")
    model = worker.make_model()
    engine = TorchEngine(model, lr=1e-2, rules=UpdateRules(grad_clip=0.5))
    engine.write((p, saved["weights"][n]) for n, p in model.named_parameters())
    engine.load_optimizer_state(saved["optimizer"])
    for update in range(3, 5):
        for x, y in worker.make_batches(update):
            engine.backward(worker.piece_loss(engine.forward(x), y), is_last=False)
        engine.step()
    expected, _ = plain_training(5)
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    np.testing.assert_allclose(parameters.numpy(), expected, atol=2e-6)


# bug report 38
@pytest.mark.parametrize("stage", range(4))
def test_any_number_of_processes_continue_from_the_state_of_one(sharded_results, stage):
    expected, _ = plain_training(5)
    for result in sharded_results[stage]:
        np.testing.assert_allclose(result["from_torch"], expected, atol=2e-6)


def test_an_optimiser_state_of_other_parameters_is_refused():
    model = worker.make_model()
    engine = TorchEngine(model, lr=0.1, rules=UpdateRules())
    with pytest.raises(ValueError, match="1 parameters that are not .*'other'"):
        engine.load_optimizer_state({"other": {}})


@pytest.mark.parametrize("stage", range(4))
def test_small_updates_are_not_lost_in_bfloat16(sharded_results, stage):
    for result in sharded_results[stage]:
        # float32 values come back as they were written ...
        np.testing.assert_array_equal(result["bf16_written"], np.float32(1.001))
        # ... and all 50 updates count: bfloat16 next to 1 would not have moved.
        # Float32 has steps of 2^-23 there, of which 1e-6 is 8.4, so each makes 8. The
        # gradients of the last layer's bias are far from 0, so that Adam moves it by
        # the whole rate; tanh in the layer before it saturates.
        moved = result["bf16_written"] - result["bf16_trained"]
        assert moved[-3:] == pytest.approx([50 * 8 * 2**-23] * 3, rel=1e-6)
        assert (moved > -1e-6).all()


def test_small_updates_are_not_lost_in_bfloat16_without_deepspeed():
    model = torch.nn.Linear(4, 4).bfloat16()
    rules = UpdateRules(grad_clip=None, weight_decay=0.0, betas=(0.0, 0.0))
    engine = TorchEngine(model, lr=1e-6, rules=rules, dtype=torch.bfloat16)
    before = model.bias.detach().clone()
    for _ in range(50):
        output = engine.forward(torch.ones(2, 4))
        assert output.dtype == torch.bfloat16
        engine.backward(output.float().sum(), is_last=True)
        engine.step()
    moved = before - engine.read(model.bias)
    assert moved.tolist() == pytest.approx([50e-6] * 4, rel=0.02)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloading_to_the_cpu_changes_nothing(sharded_results, stage):
    expected, norms = plain_training(3)
    for result in sharded_results[stage]:
        np.testing.assert_allclose(result["offloaded"], expected, atol=2e-6)
        np.testing.assert_allclose(result["offloaded_norms"], norms, rtol=1e-5)


def test_the_deepspeed_config_is_passed_through():
    config = build_config(
        2,
        grad_clip=1.0,
        dtype=torch.bfloat16,
        num_parameters=10,
        on_gpu=False,
        overrides={
            "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
            "wall_clock_breakdown": True,
        },
    )
    assert config["wall_clock_breakdown"]
    assert config["bf16"] == {"enabled": True}
    assert config["gradient_clipping"] == 1.0
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]) == (2, {"device": "cpu"})
    assert zero["reduce_bucket_size"] == 1024  # ours stay beside the user's
