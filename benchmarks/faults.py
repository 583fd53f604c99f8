"""Kills a short training run N times at random and compares it with a calm one.

    python benchmarks/faults.py --kills 3

The same command, `rllib train file run.py --resume`, starts the run and goes on with it
after each SIGKILL of all its processes. Reported are, for each kill, the steps that
were complete, the last whole checkpoint, and the step that the run went on from; and at
the end whether weights and results equal those of a run that nobody disturbed. On a CPU
they must, bit for bit.
"""

import argparse
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rllib_exgrpo.checkpoints import iteration_of, latest_complete

EXPERIMENT = """
from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import ArithmeticEnv

config = (
    ExGRPOConfig()
    .environment(ArithmeticEnv, env_config={"num_problems": 48, "digits": (1, 2)})
    .language_model(max_prompt_tokens=32, max_completion_tokens=48)
    .training(
        lr=1e-4,
        prompts_per_step=8,
        prompts_per_update=4,
        group_size=4,
        replay_start_pass_rate=None,
    )
    .debugging(seed=7)
)
"""
MODULE = "learner_group/learner/rl_module/default_policy/module_state.pkl"


@dataclass(frozen=True)
class Kill:
    """What a kill left and how the run went on.

    Attributes:
        steps: complete when it came.
        checkpoint: step of the last whole checkpoint; 0 without one.
        resumed: step after which the run went on.
    """

    steps: int
    checkpoint: int
    resumed: int

    @property
    def lost(self) -> int:
        """Steps lost although a checkpoint holds them; must be 0."""
        return self.checkpoint - self.resumed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--checkpoint-freq", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "run.py").write_text(
            f"{EXPERIMENT}\nstop = {{'training_iteration': {args.steps}}}\n"
        )
        calm = folder / "results" / "calm"
        start(folder, calm.name, args.checkpoint_freq).wait()
        run = folder / "results" / "disturbed"
        kills = disturb(folder, run, args)
        for kill in kills:
            print(
                f"killed after step {kill.steps}, last whole checkpoint of step "
                f"{kill.checkpoint}, went on after step {kill.resumed}: "
                f"{kill.lost} steps lost beyond the checkpoint"
            )
        steps = steps_of(run)
        print(f"results: steps {steps[0]} to {steps[-1]}, {len(steps)} of them")
        print(f"weights equal the calm run's: {same_weights(calm, run)}")
        print(f"pass rates equal the calm run's: {rates_of(calm) == rates_of(run)}")


def disturb(folder: Path, run: Path, args: argparse.Namespace) -> list[Kill]:
    """Runs to the end, with so many kills on the way."""
    rng = random.Random(args.seed)
    left: list[tuple[int, int]] = []
    resumed: list[int] = []
    for _ in range(args.kills):
        reached = left[-1][0] if left else 0
        target = rng.randint(min(reached + 1, args.steps - 1), args.steps - 1)
        process = start(folder, run.name, args.checkpoint_freq)
        while process.poll() is None and max(steps_of(run), default=0) < target:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 1.0))
        kill_all(process)
        left.append((max(steps_of(run), default=0), last_checkpoint(run)))
        resumed.append(resumed_from(folder, run.name))
    start(folder, run.name, args.checkpoint_freq).wait()
    resumed = [*resumed[1:], resumed_from(folder, run.name)]
    return [Kill(s, c, r) for (s, c), r in zip(left, resumed, strict=True)]


def start(folder: Path, name: str, freq: int) -> subprocess.Popen:
    log = (folder / f"{name}.log").open("w")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "rllib_exgrpo.cli", "train", "file", "run.py"),
            *("--resume", "--name", name, "--checkpoint-freq", str(freq)),
        ],
        cwd=folder,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def kill_all(process: subprocess.Popen) -> None:
    """Kills the command and everything that it has started, before any can react."""
    family = descendants(process.pid)
    for pid in (process.pid, *family):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [p for child in map(int, children) for p in (child, *descendants(child))]


def steps_of(run: Path) -> list[int]:
    return [result["training_iteration"] for result in results_of(run)]


def rates_of(run: Path) -> list[float]:
    return [result["env_runners"]["pass_rate"] for result in results_of(run)]


def results_of(run: Path) -> list[dict]:
    file = run / "trial" / "result.json"
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def last_checkpoint(run: Path) -> int:
    checkpoint, _ = latest_complete(run / "trial")
    return 0 if checkpoint is None else iteration_of(checkpoint) or 0


def resumed_from(folder: Path, name: str) -> int:
    """Reads from the command's output the step after which it went on."""
    lines = (folder / f"{name}.log").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith("Going on after step")]
    return int(words[0][4].rstrip(",")) if words else 0


def same_weights(one: Path, other: Path) -> bool:
    states = []
    for run in (one, other):
        checkpoint, _ = latest_complete(run / "trial")
        states.append(pickle.loads((checkpoint / MODULE).read_bytes()))
    first, second = states
    return first.keys() == second.keys() and all(
        np.array_equal(np.asarray(first[name]), np.asarray(second[name]))
        for name in first
    )


if __name__ == "__main__":
    main()
