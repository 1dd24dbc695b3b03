"""What the engine and the server ask of a tokenizer. Knows nothing of any tokenizer library."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}, and whatever else a model's chat template reads


@runtime_checkable
class Tokenizer(Protocol):
    """Ids and text of one model.

    Decoding is defined on bytes: a token stands for a few bytes, tokens are joined, and the whole is read as UTF-8 with
    U+FFFD for what is not UTF-8 (one for each maximal ill-formed part, as Unicode chapter 3.9 recommends). So text can
    be streamed exactly, one token at a time, whatever the ids are.
    """

    @property
    def vocab_size(self) -> int:
        """Ids below this mean something. A model's V may be larger: those rows are padding."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Any of these ends a text; the first is the one that chat templates call `eos_token`."""
        ...

    @property
    def strips_leading_space(self) -> bool:
        """Whether encoding puts a space before a text, and decoding takes one off (SentencePiece's dummy prefix)."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens that are spelled out in it are recognised; `add_special_tokens` is about those
        that the model wants around every text, such as BOS. Raises ValueError for text that is not valid Unicode."""
        ...

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids without a token (≥ vocab_size) stand for nothing."""
        ...

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """What one id adds to a text that has already begun; possibly a part of a character, possibly nothing."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt that stands for a conversation; encode it with `add_special_tokens=False`, for a template writes
        its own BOS. `variables` reach the template by name (`tools=…`, `enable_thinking=False`). Raises ValueError when
        the model has no template, or when its template refuses the messages."""
        ...
