"""The space of all texts, for prompts and completions."""

from typing import Any

from gymnasium.spaces import Space


class TextSpace(Space[str]):
    """Holds any unicode `str`, the empty one included.

    `gymnasium.spaces.Text` needs a fixed alphabet and a maximum length, and walks every
    character of a text to check it. Language models write anything, at length.
    """

    _SAMPLE_MAX_CHARS = 32

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(shape=(), dtype=str, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Draws a short printable ASCII text; masks are accepted and ignored."""
        length = int(self.np_random.integers(self._SAMPLE_MAX_CHARS + 1))
        return "".join(map(chr, self.np_random.integers(32, 127, size=length)))

    def contains(self, x: Any) -> bool:
        """Tells whether `x` is a text, in constant time."""
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        """Texts have no fixed-length array form."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace)

    def __hash__(self) -> int:
        return hash(TextSpace)

    def __repr__(self) -> str:
        return "TextSpace()"
