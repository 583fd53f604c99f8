"""Speed of the env runner's `sample()` against bare vLLM on the same prompts.

Run `python benchmarks/rollout.py`: both sides use one engine with the embedded model,
in turn, after a warm-up, and return token ids, log-probs and text. It prints tokens/s
and fails if `sample()`, which also verifies and builds episodes, gets less than 95 % of
the bare engine's. Times are CPU times, which other processes disturb least.
"""

import argparse
import statistics
import time

import vllm

from rllib_exgrpo.envs import ArithmeticEnv
from rllib_exgrpo.exgrpo_env_runner import ExGRPOEnvRunner
from rllib_exgrpo.text_env import read_prompt
from rllib_exgrpo.tuned_examples.exgrpo_arithmetic_cpu import config

MIN_OF_BARE = 0.95


def build_runner(num_prompts):
    settings = config.copy(copy_frozen=False)
    settings.environment(
        ArithmeticEnv, env_config={"split": "train", "num_problems": num_prompts}
    )
    return ExGRPOEnvRunner(
        config=settings, env_creator=ArithmeticEnv, worker_index=0, num_workers=0
    )


def bare_vllm(runner, **cheaper):
    """Samples the same prompts; `cheaper` are sampling parameters that return less."""
    settings = runner.config
    token_ids = [
        runner.formatter.token_ids(read_prompt(runner.env, prompt_id)[0])
        for prompt_id in runner.env.prompt_ids
    ]
    prompts = [{"prompt_token_ids": ids.tolist()} for ids in token_ids]
    params = vllm.SamplingParams(
        n=settings.group_size,
        temperature=settings.temperature,
        max_tokens=settings.max_completion_tokens,
        logprobs=0,
        **cheaper,
    )
    engine = runner.sampler._llm

    def sample():
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(c.token_ids) for output in outputs for c in output.outputs)

    return sample


def own_sample(runner, num_completions):
    def sample():
        episodes = runner.sample(num_episodes=num_completions, explore=True)
        outputs = [
            episode.get_extra_model_outputs("token_ids")[0] for episode in episodes
        ]
        return sum(map(len, outputs))

    return sample


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    runner = build_runner(args.prompts)
    num_completions = args.prompts * runner.config.group_size
    sides = {
        "sample()": own_sample(runner, num_completions),
        "bare vLLM": bare_vllm(runner),
        "the same, without text and in flat log-probs": bare_vllm(
            runner, detokenize=False, flat_logprobs=True
        ),
    }
    speeds = {name: [] for name in sides}
    for index in range(args.rounds + 1):
        for name, sample in sides.items():
            started = time.process_time()
            tokens = sample()
            if index:  # the first round warms up
                speeds[name].append(tokens / (time.process_time() - started))
    runner.stop()
    print(
        f"{args.prompts} prompts, {num_completions} completions, {args.rounds} rounds"
    )
    own = speeds["sample()"]
    ratios = {
        name: statistics.median(a / b for a, b in zip(own, values, strict=True))
        for name, values in speeds.items()
    }
    for name, values in speeds.items():
        speed = statistics.median(values)
        print(f"{name:46}{speed:>8.0f} tokens/s, ours over it {ratios[name]:.3f}")
    assert ratios["bare vLLM"] >= MIN_OF_BARE, ratios


if __name__ == "__main__":
    main()
