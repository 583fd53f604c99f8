"""From a problem's messages to the token ids that the engine and the learner see."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Message = Mapping[str, str]

NAMED_FORMATS: dict[str, dict[str, Any]] = {
    "paper": {
        "prompt_format": "chat",
        "system_prompt": (
            "Your task is to follow a systematic, thorough reasoning process before "
            "providing the final solution. This involves analyzing, summarizing, "
            "exploring, reassessing, and refining your thought process through "
            "multiple iterations. Structure your response into two sections: Thought "
            "and Solution. In the Thought section, present your reasoning using the "
            'format: "<think>\n {thoughts} </think>\n". Each thought should include '
            "detailed analysis, brainstorming, verification, and refinement of ideas. "
            'After "</think>\n," in the Solution section, provide the final, logical, '
            "and accurate answer, clearly derived from the exploration in the Thought "
            "section. If applicable, include the answer in \\boxed{} for closed-form "
            "results like multiple choices or mathematical solutions."
        ),
        "user_template": "This is the problem: {prompt}",
        "assistant_prefix": "<think>\n",
    },
    "paper_llama": {
        "prompt_format": "plain",
        "plain_template": "User: {prompt}\nAnswer: Let's think step by step.",
    },
}
"""The paper's prompts (appendix G.1): for most models, and for the Llama base model."""

# Stands for the n-th special token's text: lone surrogates are in no valid text.
_MARK = re.compile("\ud800(\\d+)\udfff")


class PromptFormatter:
    """Turns chat messages into prompt token ids, always the same for the same input.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt_format: "chat" uses the tokenizer's chat template; "plain" puts the last
            user message into `plain_template`; "auto" is "chat" where the tokenizer has
            a template and "plain" where it has none; or a name in `NAMED_FORMATS`.
        plain_template: with the placeholder `{prompt}`.
        system_prompt: replaces the problem's own system message, if given.
        assistant_prefix: text the completion starts after, such as "<think>".
        chat_template_kwargs: passed on to the chat template.
        max_tokens: longer prompts lose tokens on the left, but for the BOS; None keeps
            them whole.
        split_special_tokens: read a special token's text inside a message as ordinary
            text, not as that token.

    Attributes:
        tokenizer: as given.
        assistant_prefix: as given, or the named format's.

    Raises:
        ValueError: for a chat format with a tokenizer that has no template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        prompt_format: str = "auto",
        plain_template: str = "{prompt}\n",
        system_prompt: str | None = None,
        assistant_prefix: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        split_special_tokens: bool = True,
    ) -> None:
        named = NAMED_FORMATS.get(prompt_format, {})
        kind = named.get("prompt_format", prompt_format)
        if kind == "chat" and not tokenizer.chat_template:
            raise ValueError(
                f"`prompt_format`={prompt_format!r}, but the tokenizer of "
                f"{tokenizer.name_or_path!r} has no chat template (base models usually "
                "have none). Use `prompt_format`='plain', or a model or tokenizer that "
                "comes with a template."
            )
        self.tokenizer = tokenizer
        self._chat = kind == "chat" or (
            kind == "auto" and bool(tokenizer.chat_template)
        )
        self._plain_template = named.get("plain_template", plain_template)
        self._user_template = named.get("user_template", "{prompt}")
        self._system_prompt = (
            named.get("system_prompt") if system_prompt is None else system_prompt
        )
        self.assistant_prefix = assistant_prefix or named.get("assistant_prefix", "")
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._max_tokens = max_tokens
        self._split_special_tokens = split_special_tokens
        self._special_tokens = _special_tokens(tokenizer)
        self._special_pattern = re.compile(
            "|".join(map(re.escape, self._special_tokens)) or "(?!)"
        )
        self._start_ids = _start_ids(tokenizer)

    def text(self, messages: Sequence[Message]) -> str:
        """Returns the text of the prompt, the assistant prefix included."""
        if self._system_prompt is not None:
            others = [m for m in messages if m["role"] != "system"]
            messages = [{"role": "system", "content": self._system_prompt}, *others]
        if self._chat:
            text = self.tokenizer.apply_chat_template(
                [self._with_user_template(m) for m in messages],
                tokenize=False,
                add_generation_prompt=True,
                **self._chat_template_kwargs,
            )
        else:
            text = self._plain_text(messages)
        return text + self.assistant_prefix

    def _with_user_template(self, message: Message) -> dict[str, str]:
        if message["role"] != "user":
            return dict(message)
        content = self._user_template.replace("{prompt}", message["content"])
        return {**message, "content": content}

    def _plain_text(self, messages: Sequence[Message]) -> str:
        prompt = next(m["content"] for m in reversed(messages) if m["role"] == "user")
        text = self._plain_template.replace("{prompt}", prompt)
        return text if self._system_prompt is None else f"{self._system_prompt}\n{text}"

    def has_special_token_text(self, messages: Sequence[Message]) -> bool:
        """Whether a message holds text that the tokenizer takes for a special token."""
        return any(self._special_pattern.search(m["content"]) for m in messages)

    def token_ids(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Returns the (T,) int32 ids of the prompt.

        They start with what the tokenizer puts before every text (exactly one BOS, if
        it has one), whether or not a template writes it too.
        """
        (ids,) = self.whole_token_ids([messages])
        limit = self._max_tokens
        if limit is not None and len(ids) > limit:
            num_kept = len(self._start_ids) or int(
                ids[0] == self.tokenizer.bos_token_id
            )
            ids = np.append(ids[:num_kept], ids[len(ids) - (limit - num_kept) :])
        return ids

    def whole_token_ids(
        self, prompts: Sequence[Sequence[Message]]
    ) -> list[NDArray[np.int32]]:
        """Returns the ids of several prompts, however long they are."""
        texts = [self.text([self._marked(m) for m in prompt]) for prompt in prompts]
        encoded = self._encode([_MARK.sub("", text) for text in texts])
        return [
            self._started(self._encode_marked(text) if _MARK.search(text) else ids)
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def _marked(self, message: Message) -> Message:
        """Replaces special tokens' texts by marks that no tokenizer splits at."""
        if not self._split_special_tokens:
            return message

        def mark(match: re.Match[str]) -> str:
            return f"\ud800{self._special_tokens.index(match[0])}\udfff"

        content = self._special_pattern.sub(mark, message["content"])
        return {**message, "content": content}

    def _encode_marked(self, text: str) -> list[int]:
        """Encodes the text between marks as usual, and theirs as ordinary text."""
        parts = _MARK.split(text)
        parts[1::2] = [self._special_tokens[int(number)] for number in parts[1::2]]
        usual, ordinary = (
            self._encode(parts[::2]),
            self._encode(parts[1::2], split=True),
        )
        ids = usual[0]
        for ordinary_ids, usual_ids in zip(ordinary, usual[1:], strict=True):
            ids = ids + ordinary_ids + usual_ids
        return ids

    def _encode(self, texts: Sequence[str], split: bool = False) -> list[list[int]]:
        if not texts:  # the tokenizer refuses none
            return []
        return self.tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=split,
            verbose=False,  # no word on `model_max_length`: `long_prompts` rules
        ).input_ids

    def _started(self, ids: list[int]) -> NDArray[np.int32]:
        start = self._start_ids
        while start and ids[: len(start)] == start:
            ids = ids[len(start) :]
        return np.array(start + ids, np.int32)


def _special_tokens(tokenizer: Any) -> list[str]:
    """Returns the texts of all special tokens, longer ones before their prefixes."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {token.content for token in added if token.special}
    return sorted(texts | set(tokenizer.all_special_tokens), key=len, reverse=True)


def _start_ids(tokenizer: Any) -> list[int]:
    """Returns the ids that the tokenizer puts before every text, such as a BOS."""
    whole = tokenizer("a").input_ids
    bare = tokenizer("a", add_special_tokens=False).input_ids
    starts = range(len(whole) - len(bare) + 1)
    return whole[: next(k for k in starts if whole[k : k + len(bare)] == bare)]
