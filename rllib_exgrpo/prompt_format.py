"""From a problem's messages to the token ids that the engine and the learner see."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Message = Mapping[str, str]


class PromptFormatter:
    """Turns chat messages into prompt token ids, always the same for the same input.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt_format: "chat" uses the tokenizer's chat template; "plain" puts the last
            user message into `plain_template`; "auto" is "chat" where the tokenizer has
            a template and "plain" where it has none.
        plain_template: with the placeholder `{prompt}`.
        system_prompt: replaces the problem's own system message, if given.
        assistant_prefix: text the completion starts after, such as "<think>".
        chat_template_kwargs: passed on to the chat template.

    Attributes:
        tokenizer: as given.

    Raises:
        ValueError: for "chat" with a tokenizer that has no template.
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
    ) -> None:
        if prompt_format == "chat" and not tokenizer.chat_template:
            raise ValueError(
                f"`prompt_format`='chat', but the tokenizer of "
                f"{tokenizer.name_or_path!r} has no chat template (base models usually "
                "have none). Use `prompt_format`='plain', or a model or tokenizer that "
                "comes with a template."
            )
        self.tokenizer = tokenizer
        self._chat = prompt_format == "chat" or (
            prompt_format == "auto" and bool(tokenizer.chat_template)
        )
        self._plain_template = plain_template
        self._system_prompt = system_prompt
        self._assistant_prefix = assistant_prefix
        self._chat_template_kwargs = dict(chat_template_kwargs or {})

    def text(self, messages: Sequence[Message]) -> str:
        """Returns the text of the prompt, the assistant prefix included."""
        if self._system_prompt is not None:
            others = [m for m in messages if m["role"] != "system"]
            messages = [{"role": "system", "content": self._system_prompt}, *others]
        if self._chat:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=True,
                **self._chat_template_kwargs,
            )
        else:
            text = self._plain_text(messages)
        return text + self._assistant_prefix

    def _plain_text(self, messages: Sequence[Message]) -> str:
        prompt = next(m["content"] for m in reversed(messages) if m["role"] == "user")
        text = self._plain_template.replace("{prompt}", prompt)
        return text if self._system_prompt is None else f"{self._system_prompt}\n{text}"

    def token_ids(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Returns the (T,) int32 ids of the prompt, with at most one BOS.

        A chat template writes its own special tokens; only the plain format lets the
        tokenizer add its BOS.
        """
        ids = self.tokenizer(
            self.text(messages), add_special_tokens=not self._chat
        ).input_ids
        eos = self.tokenizer.eos_token_id
        # Some tokenizers end every encoded text; a prompt must stay open.
        if not self._chat and ids and ids[-1] == eos:
            ids = ids[:-1]
        return np.array(ids, np.int32)
