"""One rank of the exact-update tests: trains a small language model on ragged rows.

Run as `update_worker.py RANK WORLD_SIZE INIT_FILE OUT_DIR GRID`, GRID a comma-separated
list of STAGE:BUDGET:AGGREGATION; writes the parameters after two updates of each.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from rllib_exgrpo.batching import Rows, rows_from_groups, shard_mini_batches
from rllib_exgrpo.deepspeed_engine import DeepSpeedEngine
from rllib_exgrpo.objective import Objective, accumulate_gradients
from rllib_exgrpo.policy import LanguagePolicy
from rllib_exgrpo.records import Completion, Group
from rllib_exgrpo.training_engine import TorchEngine, TrainingEngine, UpdateRules

VOCABULARY = 60
LONGEST = 500
BUDGETS = {"all": None, "half": 3000, "rows": 1}  # about 6,000 tokens a mini-batch
CPU = torch.device("cpu")
# An eps above the noise of the gradients: AdamW divides by their size otherwise, and
# turns noise around 0 into whole steps.
RULES = UpdateRules(grad_clip=0.05, eps=1e-5)
LR = 1e-3
# Tensors as small as the test model's would otherwise stay whole in stage 3.
PARTITION_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * LONGEST,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


def make_rows(seed: int) -> Rows:
    """Four groups of 6 with lengths 1 to 500, fresh and replayed.

    One row has no verdict, one group equal rewards, and some fresh tokens a weight.
    """
    generator = np.random.default_rng(seed)
    lengths = iter([1, LONGEST, *generator.integers(1, LONGEST + 1, 22)])

    def completion(reward):
        length = next(lengths)
        ids = generator.integers(0, VOCABULARY, length).astype(np.int32)
        # About what a random model of 60 tokens gives, so that ratios spread around 1.
        logp = generator.normal(-np.log(VOCABULARY), 0.3, length).astype(np.float32)
        return Completion(ids, logp, reward, 0)

    groups = []
    for index in range(4):
        rewards = [1, 0, 1, np.nan, 0, 0] if index == 0 else [1, 0, 0, 1, 0, 1]
        rewards = [1.0] * 6 if index == 3 else rewards
        members = [completion(reward) for reward in rewards]
        replayed = members.pop(0) if index % 2 else None
        prompt = generator.integers(0, VOCABULARY, generator.integers(1, 20))
        groups.append(Group(index, prompt.astype(np.int32), members, replayed))
    rows = rows_from_groups(groups)
    weights = generator.choice([0.0, 0.5, 1.0, 1.5], len(rows.token_ids))
    is_replayed = np.repeat(rows.replayed_B, rows.lengths_B)
    weights = np.where(is_replayed, 1.0, weights).astype(np.float32)
    return replace(rows, token_weights=weights)


def make_objective(aggregation: str) -> Objective:
    return Objective(
        clip_eps=0.2,
        shaping_beta=0.1,
        replay_importance_ratio=True,
        entropy_coeff=0.01,
        aggregation=aggregation,
        max_completion_tokens=LONGEST,
    )


def make_policy() -> LanguagePolicy:
    # Chunks of 64 tokens: learners with unequal rows have unequal numbers of chunks.
    return LanguagePolicy(make_model(), logits_per_chunk=64 * VOCABULARY)


def build_engine(policy: LanguagePolicy, stage: int | None) -> TrainingEngine:
    if stage is None:
        return TorchEngine(policy, lr=LR, rules=RULES)
    return DeepSpeedEngine(
        policy,
        lr=LR,
        rules=RULES,
        zero_stage=stage,
        deepspeed_config=PARTITION_ALL if stage == 3 else {},
        device=CPU,
    )


def train(
    stage: int | None, budget: str, aggregation: str, rank: int = 0, world_size: int = 1
) -> dict[str, np.ndarray]:
    """Makes two updates; returns the parameters and the gradient norms."""
    policy = make_policy()
    engine = build_engine(policy, stage)
    objective = make_objective(aggregation)
    mini_batches = [make_rows(0), make_rows(1)]
    shares = shard_mini_batches(mini_batches, world_size, BUDGETS[budget])
    norms = []
    for mini_batch in shares[rank]:
        accumulate_gradients(
            engine,
            mini_batch,
            lambda rows, scores, mini_batch=mini_batch: objective.loss(
                rows, scores, mini_batch
            )[0],
            CPU,
        )
        norms.append(engine.step().grad_norm)
    parameters = [engine.read(p).flatten() for p in policy.model.parameters()]
    result = {"parameters": torch.cat(parameters).numpy()}
    engine.close()
    return {**result, "norms": np.array(norms)}


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size
    )
    for point in sys.argv[5].split(","):
        stage, budget, aggregation = point.split(":")
        result = train(int(stage), budget, aggregation, rank, world_size)
        np.savez(Path(sys.argv[4]) / f"{point}:{rank}.npz", **result)


if __name__ == "__main__":
    main()
