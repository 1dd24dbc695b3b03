"""Text of ids that arrive a few at a time. Knows bytes and UTF-8; does not know how a token got its bytes, nor when to
stop.

The joined pieces equal the decoding of all ids at once, for any ids: bytes that begin a character are kept until the
character is whole or cannot become so. Each id costs the same, however long the text has grown.
"""

import codecs
from collections.abc import Iterable

from jpaged.tokenizer.protocol import Tokenizer


class IncrementalDetokenizer:
    """Pieces of text, in whole characters.

    Args:
      tokenizer: gives each id its bytes.
      skip_special_tokens: leave special tokens out of the text.
      continues: the text goes on from a prompt, so a leading space is part of it. Otherwise the ids are a text of their
        own, and a tokenizer that put a space in front takes it off again.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, continues: bool = False):
        self._token_bytes = tokenizer.token_bytes
        self._skip = skip_special_tokens
        self._strip = tokenizer.strips_leading_space and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Iterable[int]) -> str:
        """The characters that `ids` complete."""
        data = b"".join([self._token_bytes(token_id, skip_special_tokens=self._skip) for token_id in ids])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became whole, or nothing."""
        return self._utf8.decode(b"", final=True)


def decode_all(tokenizer: Tokenizer, ids: Iterable[int], skip_special_tokens: bool) -> str:
    """The text of `ids` at once; what a `Tokenizer.decode` is."""
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return stream.add(ids) + stream.finish()
