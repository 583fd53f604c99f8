"""`rllib replay stats`, `list`, `show` and `diff`: buffers as text."""

import argparse
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.cli._errors import CommandError, as_command_error
from rllib_exgrpo.cli._replay_files import find_prompt, load
from rllib_exgrpo.cli._table import WIDTH, format_table, number
from rllib_exgrpo.policy import load_tokenizer, tokenizer_hash
from rllib_exgrpo.replay.buffer import ReplayBuffer
from rllib_exgrpo.replay.finding import find_buffer
from rllib_exgrpo.replay.ids import encode_id
from rllib_exgrpo.replay.summary import (
    PromptSummary,
    completion_columns,
    difference,
    summarize_prompts,
)

_BAR = 40  # characters
_QUANTILES = {"least": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "most": 1.0}


def print_stats(args: argparse.Namespace) -> None:
    """Prints buckets, distributions and sources."""
    buffer, folder = load(args.path), find_buffer(args.path)
    summary, items = summarize_prompts(buffer), completion_columns(buffer)
    counters, metadata = buffer.get_counters(), buffer.metadata
    replayed = counters["distinct_prompts_replayed"]
    facts = {
        "Buffer": folder.path,
        "Model": metadata.get("model", "not named"),
        "Environment": metadata.get("environment", "not named"),
        "State": f"after step {counters['iteration']}, weights version "
        f"{buffer.newest_version}, groups of {buffer.group_size}",
        "Contents": f"{len(buffer):,} prompts, {buffer.num_completions:,} completions, "
        f"{buffer.store.num_tokens:,} tokens; {buffer.num_retired:,} prompts retired",
        "Replayed": f"{replayed:,} prompts at least once",
    }
    print(*(f"{name:12} {fact}" for name, fact in facts.items()), sep="\n")
    print()
    print(_histogram(buffer), end="\n\n")
    print(_distributions(summary, items), end="\n\n")
    print(_sources(buffer, summary))


def _histogram(buffer: ReplayBuffer) -> str:
    size = buffer.group_size
    counts = [*buffer.bucket_sizes.tolist(), buffer.num_retired]
    most = max(*counts, 1)
    notes = {0: "kept, not drawn", size: "retired"}
    return format_table(
        {
            "correct": [f"{k}/{size}" for k in range(size + 1)],
            "prompts": [number(count) for count in counts],
            "": ["#" * round(_BAR * count / most) for count in counts],
            " ": [notes.get(k, "") for k in range(size + 1)],
        },
        text=["", " "],
    )


def _distributions(summary: PromptSummary, items: dict[str, NDArray]) -> str:
    entropy = items["entropy"]
    lines: dict[str, tuple[NDArray, int]] = {
        "completions a prompt": (summary.completions, 0),
        "replays of a prompt": (summary.replayed, 0),
        "tokens a completion": (items["length"], 0),
        "age, in versions of the weights": (items["age"], 0),
        "replays of a completion": (items["times_replayed"], 0),
        "entropy, in nats a token": (entropy[~np.isnan(entropy)], 3),
    }
    return format_table(
        {
            "": list(lines),
            **{
                header: [
                    number(np.quantile(values, q) if len(values) else np.nan, digits)
                    for values, digits in lines.values()
                ]
                for header, q in _QUANTILES.items()
            },
            "of": [number(len(values)) for values, _ in lines.values()],
        },
        text=[""],
    )


def _sources(buffer: ReplayBuffer, summary: PromptSummary) -> str:
    names = list(buffer.sources)
    of_prompt, completions = summary.source, summary.completions
    table = buffer.prompts.table
    retired = Counter(table["source"][list(buffer.prompts.members[-1])].tolist())
    return format_table(
        {
            "source": [name or "(not named)" for name in names],
            "prompts": [number((of_prompt == name).sum()) for name in names],
            "completions": [
                number(completions[of_prompt == name].sum()) for name in names
            ],
            "retired": [number(retired[i]) for i in range(len(names))],
        },
        text=["source"],
    )


def print_list(args: argparse.Namespace) -> None:
    """Prints a line for each prompt that passes the filters."""
    buffer = load(args.path)
    summary = summarize_prompts(buffer)
    chosen = np.flatnonzero(_passing(buffer, summary, args))
    keys = getattr(summary, args.sort)[chosen]
    order = np.argsort(-keys if args.descending else keys, kind="stable")
    rows = chosen[order[: args.limit or None]]
    print(_prompt_table(summary, rows, buffer.group_size))
    print(f"\n{len(rows):,} of {len(chosen):,} prompts, by {args.sort}.")


def _passing(
    buffer: ReplayBuffer, summary: PromptSummary, args: argparse.Namespace
) -> NDArray[np.bool_]:
    passing = np.ones(len(summary), bool)
    if args.bucket is not None:
        _check_buckets(args.bucket, buffer.group_size)
        passing &= np.isin(summary.bucket, args.bucket)
    if args.source is not None:
        passing &= summary.source == args.source
    for name in ("age", "entropy"):
        values = getattr(summary, name)
        low, high = getattr(args, f"min_{name}"), getattr(args, f"max_{name}")
        if low is not None:
            passing &= values >= low
        if high is not None:
            passing &= values <= high
    return passing


def _check_buckets(buckets: list[int], group_size: int) -> None:
    if not all(0 <= bucket < group_size for bucket in buckets):
        raise CommandError(
            f"--bucket is {' '.join(map(str, buckets))}, but the prompts stored lie in "
            f"the buckets 0 to {group_size - 1}: give some of these. Retired prompts "
            "are counted by `rllib replay stats`."
        )


def _prompt_table(
    summary: PromptSummary, rows: NDArray[np.int64], group_size: int
) -> str:
    def cells(values: NDArray, digits: int = 0) -> list[str]:
        return [number(value, digits) for value in values[rows].tolist()]

    return format_table(
        {
            "prompt": [encode_id(i) for i in summary.ids[rows]],
            "correct": [f"{k}/{group_size}" for k in summary.bucket[rows]],
            "completions": cells(summary.completions),
            "tokens": cells(summary.length),
            "entropy": cells(summary.entropy, 3),
            "age": cells(summary.age),
            "replayed": cells(summary.replayed),
            "step": cells(summary.iteration),
            "source": [str(name)[:16] for name in summary.source[rows]],
        },
        text=["prompt", "source"],
    )


def print_prompt(args: argparse.Namespace) -> None:
    """Prints a prompt and its completions as text."""
    buffer = load(args.path)
    prompt_id, row = find_prompt(buffer, args.prompt)
    k, step, replays = (
        int(buffer.prompts.table[name][row])
        for name in ("bucket", "iteration", "times_replayed")
    )
    state = "retired, " if k == buffer.group_size else ""
    print(
        f"Prompt {encode_id(prompt_id)}: {state}{k} of {buffer.group_size} correct at "
        f"step {step}, replays {replays}.\n"
    )
    print(_indented(_prompt_text(find_buffer(args.path).path, prompt_id)))
    as_text = _decoder(buffer.metadata)
    for place, row in enumerate(buffer.rows_of(prompt_id), 1):
        print(f"\n{_completion_header(buffer, row, place)}")
        (item,) = buffer.store.completions([row])
        print(_indented(as_text(item.token_ids)))


def _completion_header(buffer: ReplayBuffer, row: int, place: int) -> str:
    columns = {n: v[0] for n, v in buffer.store.table.columns([row]).items()}
    age = buffer.newest_version - columns["weights_version"]
    entropy = columns["entropy"]
    scored = "" if np.isnan(entropy) else f", entropy {entropy:.3f}"
    return (
        f"Completion {place} (id {columns['id']}): step {columns['iteration']}, age "
        f"{age}, reward {columns['reward']:g}, {columns['length']} tokens{scored}, "
        f"replays {columns['times_replayed']}"
    )


def _prompt_text(path: str, prompt_id: Any) -> str:
    """Returns the prompt, from the environment of the checkpoint around the buffer."""
    from rllib_exgrpo.cli.evaluate import stored_config
    from rllib_exgrpo.exgrpo_evaluation import create_env
    from rllib_exgrpo.text_env import read_prompt

    try:
        with as_command_error("its environment does not give it"):
            env = create_env(stored_config(Path(path).parent))
            messages, _ = read_prompt(env, prompt_id)
    except CommandError as error:
        return f"(No text of the prompt: {str(error).splitlines()[0]})"
    return "\n".join(f"{m['role']}: {m['content']}" for m in messages)


def _decoder(metadata: Mapping[str, str]) -> Callable[[NDArray[np.int32]], str]:
    """Returns what turns token ids into text, or lists them where that fails."""
    try:
        tokenizer = load_tokenizer(metadata.get("model", ""))
        if tokenizer_hash(tokenizer) != metadata.get("tokenizer"):
            raise ValueError(f"{metadata['model']!r} has another one here.")
    except (ValueError, OSError) as error:
        print(_indented(f"\n(Token ids, for want of the tokenizer: {error})"))
        return lambda token_ids: " ".join(map(str, token_ids))
    return tokenizer.decode


def _indented(text: str) -> str:
    lines = (
        textwrap.wrap(line, WIDTH - 4, replace_whitespace=False) or [""]
        for line in text.splitlines()
    )
    return "\n".join(f"    {part}" for parts in lines for part in parts)


def print_diff(args: argparse.Namespace) -> None:
    """Prints what changed from one buffer to another."""
    buffers = load(args.path), load(args.other)
    size = buffers[0].group_size
    if buffers[1].group_size != size:
        raise CommandError(
            f"the buckets cannot be compared: {args.path} has groups of {size}, "
            f"{args.other} of {buffers[1].group_size}."
        )
    change = difference(*buffers)
    before, after = change.moves.T
    counts = {
        "prompts only in the first": len(change.only_first),
        "prompts only in the second": len(change.only_second),
        "prompts in both": len(before),
        "  solved more often": int((after > before).sum()),
        "  solved less often": int((after < before).sum()),
        "  retired since": int(((after == size) & (before < size)).sum()),
        "completions only in the first": change.completions[0],
        "completions only in the second": change.completions[1],
        "completions in both": change.completions[2],
    }
    for what, count in counts.items():
        print(f"{what:32} {count:>12,}")
    moved = np.argsort(-np.abs(after - before), kind="stable")[: args.limit]
    moved = moved[after[moved] != before[moved]]
    if len(moved):
        print("\nThe largest moves:\n")
        print(
            format_table(
                {
                    "prompt": [encode_id(i) for i in change.common_ids[moved]],
                    "first": [f"{k}/{size}" for k in before[moved]],
                    "second": [f"{k}/{size}" for k in after[moved]],
                },
                text=["prompt"],
            )
        )
