"""Evaluate a checkpoint on held-out problems.

The whole model is rebuilt in one process, however many env runners and learners wrote
the checkpoint, so it has to fit there twice: in the learner and in the engine. On a GPU
this has not been tried; --config can ask for other numbers.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rllib_exgrpo.cli._errors import CommandError, as_command_error, error_summary
from rllib_exgrpo.cli._options import json_object
from rllib_exgrpo.cli._progress import format_pass_at_1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rllib evaluate`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its folder")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="completions of each problem"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--temperature", type=float, metavar="T", help="of sampling")
    how.add_argument("--greedy", action="store_true", help="take the likeliest tokens")
    parser.add_argument(
        "--max-prompts", type=int, metavar="N", help="evaluate only the first so many"
    )
    parser.add_argument(
        "--env-config",
        type=json_object,
        default={},
        metavar="JSON",
        help="settings of the evaluation environment; they win",
    )
    parser.add_argument(
        "--config",
        type=json_object,
        default={},
        metavar="JSON",
        help="other settings of ExGRPOConfig; they win",
    )
    parser.add_argument(
        "--output", metavar="FILE.json", help="write the metrics there as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Runs `rllib evaluate`."""
    import ray

    from rllib_exgrpo.cli._ray import quieten, ray_started
    from rllib_exgrpo.exgrpo import open_prompts

    quieten()
    path = Path(args.checkpoint).resolve()
    config = evaluation_only(stored_config(path), args)
    with as_command_error("the evaluation cannot start"):
        config.copy(copy_frozen=False).validate()
        open_prompts(config)
    print(f"Evaluating {args.checkpoint}. Starting Ray and the engine ...", flush=True)
    with ray_started(config) as needs:
        # In a worker, whose threads Ray limits and whose chatter it keeps.
        task = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0))(evaluate)
        try:
            metrics = ray.get(task.remote(str(path), config.get_state()))
        except ray.exceptions.RayError as error:
            reason = error_summary(error)
            raise CommandError(f"the evaluation failed: {reason}", 1) from error
    _print_table(config, metrics)
    if args.output:
        Path(args.output).write_text(json.dumps(metrics, indent=2) + "\n")
        print(f"Written to {args.output}.")
    return 0


def stored_config(checkpoint: Path) -> Any:
    """Returns the configuration that wrote a checkpoint.

    Raises:
        CommandError: if the folder is no checkpoint of ExGRPO.
    """
    import pickle

    from rllib_exgrpo.cli._experiment import make_importable
    from rllib_exgrpo.exgrpo_config import ExGRPOConfig

    file = checkpoint / "class_and_ctor_args.pkl"
    if not file.is_file():
        raise CommandError(
            f"{checkpoint} is no checkpoint: it has no {file.name}. Give the folder "
            "that `rllib train` names at its end, `.../trial/checkpoint_000000`."
        )
    # An environment of the user's own is found from the folder of the command, as
    # `rllib train` found it.
    make_importable(Path.cwd())
    with as_command_error(
        f"{checkpoint} cannot be read (if a module is missing, run this command in the "
        "folder of the experiment file that trained it)"
    ):
        # RLlib's own format: trust the checkpoint as you would trust its code.
        (state,), _ = pickle.loads(file.read_bytes())["ctor_args_and_kwargs"]
        config = ExGRPOConfig.from_state(state)
    if not isinstance(config, ExGRPOConfig):
        raise CommandError(f"{checkpoint} holds a {type(config).__name__}.")
    return config


def evaluation_only(stored: Any, args: argparse.Namespace) -> Any:
    """Returns a config whose environment is the stored one's evaluation environment.

    It has no other processes, and takes the options of the command line.
    """
    evaluation = stored.get_evaluation_config_object()
    samples = stored.evaluation_samples_per_prompt
    temperature = 0.0 if args.greedy else args.temperature
    config = stored.copy(copy_frozen=False)
    config.environment(evaluation.env)
    config.env_config = {**evaluation.env_config, **args.env_config}
    config.evaluation_config = None
    config.evaluation_interval = None
    settings = {
        "num_env_runners": 0,
        "num_learners": 0,
        "zero_stage": None,
        "evaluation_samples_per_prompt": args.samples or samples,
        "evaluation_max_prompts": args.max_prompts or stored.evaluation_max_prompts,
        **({} if temperature is None else {"evaluation_temperature": temperature}),
        **args.config,
    }
    with as_command_error("the evaluation cannot start"):
        return config.update_from_dict(settings)


def evaluate(checkpoint: str, config_state: dict[str, Any]) -> dict[str, float]:
    """Loads the weights of a checkpoint and evaluates them.

    Args:
        checkpoint: its folder.
        config_state: of the config to evaluate with.

    Returns:
        Metric name to value.
    """
    from rllib_exgrpo.exgrpo import ExGRPO
    from rllib_exgrpo.exgrpo_config import ExGRPOConfig

    algorithm = ExGRPO(config=ExGRPOConfig.from_state(config_state))
    # Only the weights: optimiser states fit no other number of learners.
    module = "learner_group/learner/rl_module"
    algorithm.restore_from_path(f"{checkpoint}/{module}", component=module)
    metrics = algorithm.evaluate()
    algorithm.stop()
    return {name: float(value) for name, value in metrics.items()}


def _print_table(config: Any, metrics: Mapping[str, float]) -> None:
    env = getattr(config.env, "__name__", config.env)
    temperature = config.evaluation_temperature
    how = "greedy" if temperature == 0 else f"at temperature {temperature:g}"
    rows = {
        "Problems": f"{metrics['num_prompts']:.0f} of {env} {config.env_config}",
        "Samples": f"{config.evaluation_samples_per_prompt} a problem, {how}",
        "pass@1": f"{format_pass_at_1(metrics)} % (± standard error over the problems)",
        "Length": f"{metrics['completion_length_mean']:.1f} tokens on average",
        "Truncated": f"{100 * metrics['truncated_fraction']:.1f} % of completions",
    }
    prefix = "pass_at_1_of_"
    rows |= {
        f"  {key.removeprefix(prefix)}": f"{100 * value:.1f} %"
        for key, value in metrics.items()
        if key.startswith(prefix)
    }
    width = max(map(len, rows))
    for label, value in rows.items():
        print(f"{label:{width}}  {value}")
