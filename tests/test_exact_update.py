"""The update is the same however rows are cut, and that of plain PyTorch."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import update_worker as worker

AGGREGATIONS = ["completion_mean", "completion_sum", "token_mean", "sequence_mean"]
TOLERANCE = 2e-5


def row_terms(model, rows, row):
    """Policy terms and entropies of one row's counted tokens, by themselves."""
    one = rows.take(np.array([row]))
    ids = torch.tensor(np.concatenate([one.prompt_token_ids, one.token_ids])).long()
    logits = model(input_ids=ids[None]).logits[0, len(one.prompt_token_ids) - 1 : -1]
    distribution = torch.distributions.Categorical(logits=logits)
    logp = distribution.log_prob(torch.tensor(one.token_ids))
    ratio = (logp - torch.tensor(one.behavior_logp)).exp()
    advantage = float(one.advantages_B[0])
    if one.replayed_B[0]:
        terms = -advantage * ratio / (ratio + 0.1)
    else:
        clipped = ratio.clamp(0.8, 1.2)
        terms = torch.maximum(-advantage * ratio, -advantage * clipped)
        terms = terms * torch.tensor(one.token_weights)
    counts = torch.tensor((one.token_weights > 0) & one.scored_B[0])
    return terms[counts], distribution.entropy()[counts]


def plain_loss(model, rows, aggregation):
    terms, entropies = zip(
        *(row_terms(model, rows, row) for row in range(len(rows))), strict=True
    )
    counted = [t for t in terms if len(t)]
    bonus = 0.01 * torch.cat(entropies).mean()
    match aggregation:
        case "completion_mean":
            loss = sum(t.sum() / worker.LONGEST for t in counted) / len(counted)
        case "completion_sum":
            loss = sum(t.sum() / worker.LONGEST for t in counted)
        case "token_mean":
            loss = torch.cat(counted).mean()
        case "sequence_mean":
            loss = sum(t.mean() for t in counted) / len(counted)
    return loss - bonus


@cache
def plain_training(aggregation):
    """Reference: one row at a time, no padding, PyTorch's optimiser and clipping."""
    model = worker.make_model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=worker.LR, eps=worker.RULES.eps, weight_decay=0.01
    )
    norms = []
    for seed in range(2):
        optimizer.zero_grad()
        plain_loss(model, worker.make_rows(seed), aggregation).backward()
        norm = torch.nn.utils.clip_grad_norm_(
            model.parameters(), worker.RULES.grad_clip
        )
        norms.append(float(norm))
        optimizer.step()
    return flat(model), norms


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def check(result, aggregation):
    expected, norms = plain_training(aggregation)
    moved = np.abs(expected - flat(worker.make_model()))
    assert np.median(moved) > 10 * TOLERANCE  # the comparison means something
    np.testing.assert_allclose(result["parameters"], expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(result["norms"], norms, rtol=1e-4)


def train_on_processes(world_size, points, out):
    """Runs the grid points on so many processes; returns each rank's results."""
    arguments = [str(world_size), str(out / "init"), str(out), ",".join(points)]
    ranks = [
        subprocess.Popen(
            [sys.executable, worker.__file__, str(rank), *arguments],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output[-4000:]
    return {
        point: [np.load(out / f"{point}:{rank}.npz") for rank in range(world_size)]
        for point in points
    }


def check_grid(world_size, points, out):
    for point, ranks in train_on_processes(world_size, points, out).items():
        for result in ranks:
            check(result, point.split(":")[2])


@pytest.mark.parametrize("budget", worker.BUDGETS)
def test_plain_pytorch_under_any_budget(budget):
    check(worker.train(None, budget, "completion_mean"), "completion_mean")


@pytest.mark.parametrize("aggregation", AGGREGATIONS[1:])
def test_every_aggregation(aggregation):
    check(worker.train(None, "half", aggregation), aggregation)


def test_two_learners_at_every_zero_stage(tmp_path):
    points = [f"{stage}:half:completion_mean" for stage in range(4)]
    check_grid(2, points, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_cut(tmp_path, world_size):
    points = [
        f"{stage}:{budget}:{aggregation}"
        for stage in range(4)
        for budget in worker.BUDGETS
        for aggregation in AGGREGATIONS
    ]
    check_grid(world_size, points, tmp_path)
