"""`rllib replay audit`: what was replayed, step by step, and why."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from rllib_exgrpo.cli._errors import CommandError
from rllib_exgrpo.cli._table import format_table, number, share
from rllib_exgrpo.replay.audit import AUDIT_FOLDER, Audit
from rllib_exgrpo.replay.folder import Folder
from rllib_exgrpo.replay.ids import decode_id, encode_id

_LEGEND = """\
k, then k   correct completions of the prompt's group before and in this step
chance      of a single draw to take this prompt
score       {score}
mean, rank  of the candidates' scores; place of the replayed one among them, 1 = lowest
age         versions of the weights since it was sampled
ratio       mean importance ratio of its tokens
saturated   share of its tokens with f(w) > 0.9
            (0 tokens: all of its group were right, and the update left it out)"""
_SCORES = {
    "entropy": "entropy a token under the current weights, in nats",
    "nll": "negative log-likelihood a token under the current weights",
}


def print_audit(args: argparse.Namespace) -> None:
    """Prints one step, one prompt, or a line for each step."""
    audit = Audit(Folder.at(_find_audit(Path(args.path))))
    if args.iteration is not None and args.iteration not in audit.iterations():
        raise CommandError(_no_such_step(audit, args))
    rows = audit.read(args.iteration)
    columns = {name: rows[name].to_numpy() for name in rows.column_names}
    if args.prompt is not None:
        wanted = np.isin(columns["prompt_id"], _spellings(args.prompt))
        columns = {name: values[wanted] for name, values in columns.items()}
    if not len(columns["iteration"]):
        raise CommandError(_nothing(args))
    if args.iteration is None and args.prompt is None:
        print(_by_step(columns))
    else:
        print(_by_row(columns))


def _find_audit(run: Path) -> Path:
    """Returns the audit folder of a run, given by a folder around or inside it."""
    inside = [p for p in (run, *run.resolve().parents) if (p / AUDIT_FOLDER).is_dir()]
    found = [inside[0] / AUDIT_FOLDER] if inside else sorted(run.rglob(AUDIT_FOLDER))
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        raise CommandError(
            f"{run} must hold the audit of one run, a folder {AUDIT_FOLDER!r}; there "
            f"is {names}. A run has one once it has replayed something."
        )
    return found[0]


def _spellings(text: str) -> list[str]:
    """Returns the texts that the id of a prompt may have in the audit."""
    try:
        return [encode_id(decode_id(text)), encode_id(text)]
    except (ValueError, KeyError, AttributeError, TypeError):  # bare text
        return [encode_id(text)]


def _no_such_step(audit: Audit, args: argparse.Namespace) -> str:
    steps = audit.iterations()
    span = f"steps {min(steps)} to {max(steps)}" if steps else "no step"
    return (
        f"--iteration is {args.iteration}, but the audit of {args.path} holds {span}, "
        f"{len(steps)} in which something was replayed."
    )


def _nothing(args: argparse.Namespace) -> str:
    what = f"the prompt {args.prompt} was" if args.prompt else "something was"
    when = "at any step" if args.iteration is None else f"at step {args.iteration}"
    return f"the audit of {args.path} does not say that {what} replayed {when}."


def _by_row(columns: dict[str, Any]) -> str:
    rule = str(columns["rule"][0])
    kind = rule.rpartition("_")[2]
    first = columns["iteration"][0]
    when = f"at step {first}" if (columns["iteration"] == first).all() else "by step"
    table = format_table(
        {
            "prompt": list(columns["prompt_id"]),
            "step": [number(v) for v in columns["iteration"]],
            "k": [number(v) for v in columns["bucket"]],
            "chance": [f"{100 * v:.2g} %" for v in columns["probability"]],
            "score": [number(v, 3) for v in columns["score"]],
            "mean": [number(v, 3) for v in columns["mean_score"]],
            "rank": [
                f"{rank or '-'} of {n}"
                for rank, n in zip(columns["rank"], columns["candidates"], strict=True)
            ],
            "age": [number(v) for v in columns["age"]],
            "tokens": [number(v) for v in columns["tokens"]],
            "ratio": [number(v, 3) for v in columns["importance_ratio"]],
            "saturated": [share(v) for v in columns["saturated"]],
            "then k": [number(v) for v in columns["correct"]],
        },
        text=["prompt"],
    )
    legend = _LEGEND.format(score=_SCORES.get(kind, "not needed by this rule"))
    return f"Replayed {when}; completions chosen by {rule}.\n\n{table}\n\n{legend}"


def _by_step(columns: dict[str, Any]) -> str:
    steps, starts = np.unique(columns["iteration"], return_index=True)

    def mean(name: str) -> Any:
        values = columns[name].astype(float)
        counts = np.add.reduceat(~np.isnan(values), starts, dtype=float)
        with np.errstate(invalid="ignore"):  # NaN where a step has no value
            return np.add.reduceat(np.nan_to_num(values), starts) / counts

    table = format_table(
        {
            "step": [number(v) for v in steps],
            "prompts": [number(v) for v in np.diff([*starts, len(columns["rank"])])],
            "mean k": [number(v, 1) for v in mean("bucket")],
            "score": [number(v, 3) for v in mean("score")],
            "of candidates": [number(v, 3) for v in mean("mean_score")],
            "candidates": [number(v, 1) for v in mean("candidates")],
            "age": [number(v, 1) for v in mean("age")],
            "tokens": [number(v) for v in mean("tokens")],
            "ratio": [number(v, 3) for v in mean("importance_ratio")],
            "saturated": [share(v) for v in mean("saturated")],
            "then k": [number(v, 1) for v in mean("correct")],
        }
    )
    return f"{table}\n\nMeans over the prompts of a step; --iteration N shows them."
