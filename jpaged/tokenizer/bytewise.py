"""A tokenizer of bytes, so that the engine and the server can be tested without any file."""

from collections.abc import Iterable, Sequence
from typing import Any

from jpaged.tokenizer.detokenize import decode_all
from jpaged.tokenizer.protocol import Message


class ByteTokenizer:
    """Ids 0 to 255 are bytes of UTF-8, 256 is BOS, 257 is EOS. Nothing in a text is read as a special token.

    Its chat template is fixed: a line `role: content` for each message, then `assistant:` to be continued.
    """

    vocab_size = 258
    bos_token_id: int | None = 256
    eos_token_ids: tuple[int, ...] = (257,)
    strips_leading_space = False
    has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return decode_all(self, ids, skip_special_tokens)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        if token_id < 256:
            return bytes((token_id,))
        return b"" if skip_special_tokens else {256: b"<bos>", 257: b"<eos>"}.get(token_id, b"")

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + "assistant:" * add_generation_prompt
