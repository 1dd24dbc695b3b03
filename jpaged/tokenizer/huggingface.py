"""A tokenizer from the `tokenizers` library, and its two files beside a checkpoint.

Knows how that library's decoders turn tokens into bytes. Does not know where a tokenizer comes from: `models` builds it
from a Hugging Face folder or from GGUF.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jpaged.tokenizer.chat import ChatTemplate, ChatTemplateError
from jpaged.tokenizer.detokenize import decode_all
from jpaged.tokenizer.protocol import Message

TOKENIZER_FILE = "tokenizer.json"  # the library's own form
EXTRAS_FILE = "jpaged_tokenizer.json"  # what that form has no place for


class HFTokenizer:
    """`jpaged.tokenizer.Tokenizer` over `tokenizers.Tokenizer`.

    Args:
      backend: the library's tokenizer. Truncation and padding are switched off.
      bos_token_id: the id that begins a text, if the model has one.
      eos_token_ids: ids that end one.
      chat_template: Jinja text.
      add_bos: whether `encode` puts BOS before a text; None leaves special tokens to the backend's post-processor.

    Raises:
      ValueError: the backend's decoder is of a kind that has no meaning in bytes, or an id has no token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        add_bos: bool | None = None,
    ):
        named = [*eos_token_ids, *([] if bos_token_id is None else [bos_token_id])]
        if unknown := [token_id for token_id in named if not _has_token(backend, token_id)]:
            raise ValueError(
                f"{bos_token_id=} and {eos_token_ids=} must be ids of this tokenizer; {unknown} are not: correct the "
                "model's config, or give the tokenizer that belongs to it"
            )
        if add_bos and bos_token_id is None:
            raise ValueError(f"{add_bos=} needs a BOS token, but {bos_token_id=}; name one, or set add_bos=False")
        backend.no_truncation()
        backend.no_padding()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._backend = backend
        self._add_bos = add_bos
        self._to_bytes, self.strips_leading_space = _byte_rule(backend)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added), 0)
        self._bytes_of: dict[
            int, bytes
        ] = {}  # grows to the tokens that are met: no start-up cost for a large vocabulary
        self._chat = None if chat_template is None else ChatTemplate(chat_template, self._template_tokens())

    def _template_tokens(self) -> dict[str, str]:
        ids = {"bos_token": self.bos_token_id, "eos_token": next(iter(self.eos_token_ids), None)}
        return {name: self._backend.id_to_token(i) or "" for name, i in ids.items() if i is not None}

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        by_backend = add_special_tokens and self._add_bos is None
        try:
            ids = self._backend.encode(text, add_special_tokens=by_backend).ids
        except TypeError as error:  # the library's word for lone surrogates, which are no text
            raise ValueError(
                f"text={text[:80]!a} must be valid Unicode, without lone surrogates; read it as UTF-8"
            ) from error
        bos = [self.bos_token_id] if self._add_bos and self.bos_token_id is not None and add_special_tokens else []
        return bos + ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        return decode_all(self, ids, skip_special_tokens)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """See `Tokenizer.token_bytes`."""
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        known = self._bytes_of.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = self._bytes_of[token_id] = b"" if token is None else self._to_bytes(token)
        return known

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """See `Tokenizer.apply_chat_template`."""
        if self._chat is None:
            raise ChatTemplateError("This model has no chat template; give it a prompt instead of messages.")
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def save(self, folder: Path) -> None:
        """Writes two files into an existing folder, from which `load` makes the same tokenizer again."""
        self._backend.save(str(folder / TOKENIZER_FILE), pretty=False)
        extras = {
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": self.eos_token_ids,
            "add_bos": self._add_bos,
            "chat_template": None if self._chat is None else self._chat.source,
        }
        (folder / EXTRAS_FILE).write_text(json.dumps(extras, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "HFTokenizer":
        """The tokenizer that `save` wrote. Raises ValueError naming the file that is missing or damaged."""
        path = folder / EXTRAS_FILE
        try:
            extras = json.loads(path.read_text(encoding="utf-8"))
            _check_extras(extras)
            return cls(read_backend(folder / TOKENIZER_FILE), **extras)
        except (OSError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} cannot be read as a saved tokenizer ({error}); save it again") from error


def _has_token(backend: tokenizers.Tokenizer, token_id: int) -> bool:
    return 0 <= token_id < 2**32 and backend.id_to_token(token_id) is not None  # the library counts in 32 bits


def _check_extras(extras: Any) -> None:
    """Raises TypeError for what `save` did not write."""
    if not isinstance(extras, dict):
        raise TypeError(f"it holds a {type(extras).__name__} where an object is wanted")
    known: dict[str, Callable[[Any], bool]] = {
        "bos_token_id": lambda value: type(value) in (int, type(None)),
        "eos_token_ids": lambda value: isinstance(value, list) and all(type(token_id) is int for token_id in value),
        "add_bos": lambda value: type(value) in (bool, type(None)),
        "chat_template": lambda value: type(value) in (str, type(None)),
    }
    if wrong := [f"{name}={value!r}" for name, value in extras.items() if not known.get(name, lambda _: False)(value)]:
        raise TypeError(f"{', '.join(wrong)[:200]} must be as it was saved")


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """A `tokenizer.json`. Raises ValueError naming the file if it is missing or damaged."""
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower for a file that it cannot open or parse
        raise ValueError(f"{path} cannot be read as a tokenizer ({error}); fetch or save it again") from error


def _byte_rule(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How a token of this backend becomes bytes, and whether a text loses one leading space.

    Two families cover the models that are served here: byte-level BPE, whose tokens spell bytes in a printable
    alphabet, and SentencePiece, whose tokens are text with U+2581 for a space and `<0x0A>` for a lone byte. For both
    the library decodes whole sequences only; on bytes, each token is decoded once and for all. The results differ in
    one case: in a run of lone bytes that holds an ill-formed one, the library gives up on the whole run.
    """
    decoder = backend.decoder
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state] if state else [])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _from_byte_alphabet, False
    if kinds == ["Metaspace"]:
        spaces = [(steps[0]["replacement"], " ")]
        return lambda token: _replace_all(token, spaces).encode(), steps[0]["prepend_scheme"] != "never"
    if {"Fuse"} < set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        rules = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
        strips = [(step["content"], step["start"], step["stop"]) for step in steps if step["type"] == "Strip"]
        if all(pattern for pattern, _ in rules) and strips in ([], [(" ", 1, 0)]):
            fallback = "ByteFallback" in kinds
            return lambda token: _from_sentencepiece(token, rules, fallback), bool(strips)
    raise ValueError(
        f"The tokenizer's decoder must be ByteLevel, Metaspace, or SentencePiece's Replace, ByteFallback, Fuse and "
        f"Strip; it is {json.dumps(state) if state else None}. Run the model on token ids instead."
    )


def _replace_all(token: str, rules: list[tuple[str, str]]) -> str:
    for old, new in rules:
        token = token.replace(old, new)
    return token


def _from_sentencepiece(token: str, rules: list[tuple[str, str]], fallback: bool) -> bytes:
    if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        digits = token[3:5]
        if all(digit in "0123456789abcdefABCDEF" for digit in digits):
            return bytes.fromhex(digits)
    return _replace_all(token, rules).encode()


def _printable_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards, in order."""
    itself = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_LETTER = _printable_bytes()


def _from_byte_alphabet(token: str) -> bytes:
    """An added token may hold other letters, such as spaces; then the whole of it is plain text."""
    if all(letter in _BYTE_OF_LETTER for letter in token):
        return bytes(_BYTE_OF_LETTER[letter] for letter in token)
    return token.encode()
