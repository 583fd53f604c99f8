"""Evaluate a checkpoint on held-out problems.

The whole model is rebuilt in one process, however many env runners and learners wrote
the checkpoint, so it has to fit there twice: in the learner and in the engine. On a GPU
this has not been tried; --config can ask for other numbers.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_exgrpo.cli._errors import CommandError, as_command_error, error_summary
from rllib_exgrpo.cli._options import json_object
from rllib_exgrpo.evaluation.sets import UNNAMED

if TYPE_CHECKING:
    from rllib_exgrpo.evaluation.questions import Question
    from rllib_exgrpo.evaluation.sets import EvaluationSet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rllib evaluate`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its folder")
    problems = parser.add_mutually_exclusive_group()
    problems.add_argument(
        "--data",
        metavar="FILE",
        help="problems in a parquet, JSON-lines or CSV file, in place of the "
        "checkpoint's evaluation sets; read by its environment, or by MathEnv",
    )
    problems.add_argument(
        "--set", metavar="NAME", help="only this evaluation set of the checkpoint"
    )
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
    parser.add_argument(
        "--questions",
        metavar="FILE.parquet",
        help="write the result of each question there, for `rllib compare`",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `rllib evaluate`."""
    import ray

    from rllib_exgrpo.cli._ray import quieten, ray_started
    from rllib_exgrpo.cli._tables import evaluation_lines, metrics_by_set
    from rllib_exgrpo.exgrpo_evaluation import open_prompts

    quieten()
    path = Path(args.checkpoint).resolve()
    with as_command_error("the evaluation cannot start"):
        stored = stored_config(path)
        sets = chosen_sets(stored, args)
        config = evaluation_only(stored, next(iter(sets.values())), args.config)
        config.copy(copy_frozen=False).validate()
        for evaluation_set in sets.values():
            open_prompts(config, evaluation_set)
    print(f"Evaluating {args.checkpoint}. Starting Ray and the engine ...", flush=True)
    with ray_started(config) as needs:
        # In a worker, whose threads Ray limits and whose chatter it keeps.
        task = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0))(evaluate)
        try:
            metrics, questions = ray.get(
                task.remote(str(path), config.get_state(), sets)
            )
        except ray.exceptions.RayError as error:
            reason = error_summary(error)
            raise CommandError(f"the evaluation failed: {reason}", 1) from error
    for name, found in metrics_by_set(metrics, sets).items():
        print("", *evaluation_lines(sets[name], found), sep="\n")
    print("\nIn per cent, with 95 % bootstrap intervals over the questions.")
    _write(args, metrics, questions)
    return 0


def _write(args: argparse.Namespace, metrics: Any, questions: Any) -> None:
    from rllib_exgrpo.evaluation.questions import write_question_file

    if args.output:
        Path(args.output).write_text(json.dumps(metrics, indent=2) + "\n")
    if args.questions:
        write_question_file(args.questions, questions)
    for file in filter(None, (args.output, args.questions)):
        print(f"Written to {file}.")


def stored_config(checkpoint: Path) -> Any:
    """Returns the configuration that wrote a checkpoint.

    Raises:
        CommandError: if the folder is no checkpoint of ExGRPO.
    """
    from pyarrow.fs import LocalFileSystem

    from rllib_exgrpo.checkpoints import CONSTRUCTOR_FILE, config_state
    from rllib_exgrpo.cli._experiment import make_importable
    from rllib_exgrpo.exgrpo_config import ExGRPOConfig

    if not (checkpoint / CONSTRUCTOR_FILE).is_file():
        raise CommandError(
            f"{checkpoint} is no checkpoint: it has no {CONSTRUCTOR_FILE}. Give the "
            "folder that `rllib train` names at its end, `.../trial/checkpoint_000000`."
        )
    # An environment of the user's own is found from the folder of the command, as
    # `rllib train` found it.
    make_importable(Path.cwd())
    with as_command_error(
        f"{checkpoint} cannot be read (if a module is missing, run this command in the "
        "folder of the experiment file that trained it)"
    ):
        state = config_state(str(checkpoint), LocalFileSystem())
        config = ExGRPOConfig.from_state(state)
    if not isinstance(config, ExGRPOConfig):
        raise CommandError(f"{checkpoint} holds a {type(config).__name__}.")
    return config


def chosen_sets(stored: Any, args: argparse.Namespace) -> "dict[str, EvaluationSet]":
    """Returns the evaluation sets that the options ask for.

    Raises:
        CommandError: for a set that the checkpoint does not have.
    """
    sets = stored.build_evaluation_sets()
    if args.data:
        first = next(iter(sets.values()))
        sets = {UNNAMED: replace(first, name=UNNAMED, **_of_file(first, args.data))}
    elif args.set:
        if args.set not in sets:
            raise CommandError(f"--set is {args.set!r}; there are {', '.join(sets)}.")
        sets = {args.set: sets[args.set]}
    given = {
        "samples": args.samples,
        "temperature": 0.0 if args.greedy else args.temperature,
        "max_prompts": args.max_prompts,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return {
        name: replace(s, **changes, env_config={**s.env_config, **args.env_config})
        for name, s in sets.items()
    }


def _of_file(evaluation_set: "EvaluationSet", data: str) -> dict[str, Any]:
    """Returns the environment that reads a file of problems, and its settings.

    It is the checkpoint's own if that reads files, with its columns but all rows.
    """
    from rllib_exgrpo.envs import MathEnv, TableEnv

    # Workers run in another folder.
    settings: dict[str, Any] = {"data": str(Path(data).resolve())}
    env = evaluation_set.env
    if isinstance(env, type) and issubclass(env, TableEnv):
        all_rows = {"split": None, "limit": None}
        settings = {**evaluation_set.env_config, **all_rows, **settings}
        return {"env": env, "env_config": settings}
    return {"env": MathEnv, "env_config": settings}


def evaluation_only(
    stored: Any, evaluation_set: "EvaluationSet", changes: Mapping[str, Any]
) -> Any:
    """Returns a config without training data and other processes.

    Args:
        stored: the config of the checkpoint.
        evaluation_set: whose environment takes the place of that of training.
        changes: settings of the command line.
    """
    config = stored.copy(copy_frozen=False).environment(evaluation_set.env)
    config.env_config = dict(evaluation_set.env_config)
    config.deepspeed_config = {}
    settings = {
        "num_env_runners": 0,
        "num_learners": 0,
        "zero_stage": None,
        "evaluation_interval": None,
        "evaluation_config": None,
        "evaluation_sets": {},
        "best_checkpoint_set": None,
        **changes,
    }
    return config.update_from_dict(settings)


def evaluate(
    checkpoint: str, config_state: dict[str, Any], sets: "dict[str, EvaluationSet]"
) -> "tuple[dict[str, Any], list[Question]]":
    """Loads the weights of a checkpoint and evaluates them.

    Args:
        checkpoint: its folder.
        config_state: of the config to evaluate with.
        sets: what to evaluate.

    Returns:
        The metrics, and the result of each question.
    """
    from rllib_exgrpo.exgrpo import ExGRPO
    from rllib_exgrpo.exgrpo_config import ExGRPOConfig

    algorithm = ExGRPO(config=ExGRPOConfig.from_state(config_state))
    # Only the weights: an evaluation needs no optimiser.
    module = "learner_group/learner/rl_module"
    algorithm.restore_from_path(f"{checkpoint}/{module}", component=module)
    metrics = algorithm.evaluate(sets=sets)
    algorithm.stop()
    return metrics, algorithm.evaluator.questions
