"""The memory formulas, on numbers worked out by hand."""

from dataclasses import replace

import pytest

from rllib_exgrpo.memory import (
    ModelSize,
    _training_state_bytes,
    buffer_bytes,
    checkpoint_bytes,
    cpu_engine_bytes,
    learner_bytes,
)
from rllib_exgrpo.policy import build_empty

# 1000 parameters of 2 bytes, all trained; 3 layers of width 10, 50 words.
SIZE = ModelSize(1000, 1000, 3, 10, 50, 2)


def learner(zero_stage, num_learners=4, gradient_checkpointing=False):
    return learner_bytes(
        SIZE,
        num_learners=num_learners,
        zero_stage=zero_stage,
        micro_batch_tokens=100,
        gradient_checkpointing=gradient_checkpointing,
    )


# A layer keeps 17 * 2 * 100 * 10 = 34,000; three 102,000. Logits: 3 * 4 * 100 * 50.
REST = 102_000 + 60_000


@pytest.mark.parametrize(
    ("zero_stage", "state"),
    [
        (None, 16000),
        (0, 2000 + 2000 + 12000),
        (1, 2000 + 2000 + 3000),
        (2, 2000 + 500 + 3000),
        (3, 500 + 500 + 3000),
    ],
)
def test_zero_shards_one_part_more_with_each_stage(zero_stage, state):
    assert learner(zero_stage) == state + REST


def test_one_learner_has_nothing_to_share_with():
    assert learner(3, num_learners=1) == learner(3, num_learners=0) == 16_000 + REST


def test_gradient_checkpointing_keeps_the_inputs_and_one_layer():
    # Inputs 3 * 2 * 100 * 10 = 6,000, and one layer's 34,000.
    assert learner(0, gradient_checkpointing=True) == 16_000 + 40_000 + 60_000


def test_engine_buffer_and_checkpoint():
    assert cpu_engine_bytes(SIZE, 500) == 4500
    assert buffer_bytes(10, 8, 100) == 64_000
    assert checkpoint_bytes(SIZE) == 14_000


def test_of_adapters_only_they_have_gradients_and_moments():
    adapters = replace(SIZE, trained=100)
    state = _training_state_bytes(adapters, 4, 1)
    assert state == 1800 + 200 + 200 + 300
    assert checkpoint_bytes(adapters) == 2000 + 1200


def test_the_numbers_of_the_embedded_model():
    size = ModelSize.of(build_empty("tiny-arithmetic", dtype="float32"))
    assert size.trained == size.parameters
    assert (size.layers, size.bytes_per_weight) == (4, 4)
    # Embeddings are tied: counted once.
    assert 500_000 < size.parameters < 900_000
