"""Continues a checkpoint in a process of its own.

Run as `resume_worker.py CHECKPOINT STEPS OUT`; pickles the record of each step and the
weights after the last.
"""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import numpy as np
from ray._private.dict import flatten_dict
from ray.rllib.core import DEFAULT_MODULE_ID

_PARTS = (
    "env_runners",
    "learners",
    "replay",
    "evaluation",
    "training_iteration",
    "num_env_steps_sampled_lifetime",
)
_TIMES = ("_s", "tokens_per_second", "throughput", "_per_sec")


def weights_of(algo) -> dict[str, np.ndarray]:
    state = algo.learner_group.get_weights()[DEFAULT_MODULE_ID]
    return {name: np.array(value) for name, value in state.items()}


def train_and_record(algo) -> dict[str, Any]:
    """Makes a step; returns its metrics but for times, and what it asked for."""
    result = algo.train()
    metrics = flatten_dict(
        {part: result[part] for part in _PARTS if part in result}, delimiter="/"
    )
    requests = algo._rollout._requests
    return {
        "metrics": {k: v for k, v in metrics.items() if not k.endswith(_TIMES)},
        "prompts": [request.prompt_ids for request in requests],
        "seeds": [request.seed for request in requests],
    }


def main() -> None:
    import ray

    from rllib_exgrpo import ExGRPO

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    algo = ExGRPO.from_checkpoint(sys.argv[1])
    steps = [train_and_record(algo) for _ in range(int(sys.argv[2]))]
    Path(sys.argv[3]).write_bytes(pickle.dumps((steps, weights_of(algo))))
    algo.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
