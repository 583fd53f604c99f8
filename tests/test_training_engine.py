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
def sharded_results(request, tmp_path_factory):
    """What each rank computed at each ZeRO stage."""
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
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output[-4000:]
    return [
        [np.load(out / f"stage{stage}_rank{r}.npz") for r in range(size)]
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
    norms = worker.train(engine, 0, 1, range(3))
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
    assert engine.optimizer.last_result.grad_norm == pytest.approx(100)
    assert model.weight.grad.item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [("gradient_clipping", 2.0), ("train_batch_size", 8), ("optimizer", {})],
)
def test_settings_with_a_knob_of_their_own_are_refused(key, value):
    with pytest.raises(ValueError, match=f"`deepspeed_config` sets '{key}'"):
        build_config(
            1, grad_clip=1.0, num_parameters=10, on_gpu=False, overrides={key: value}
        )


def test_a_second_zero_stage_is_refused():
    with pytest.raises(ValueError, match="stage 3 and `zero_stage` for 1"):
        build_config(
            1,
            grad_clip=1.0,
            num_parameters=10,
            on_gpu=False,
            overrides={"zero_optimization": {"stage": 3}},
        )
