"""A tokenizer rebuilt from GGUF metadata (`tokenizer.ggml.*`). Knows the two kinds that the served models use,
byte-level BPE ("gpt2") and SentencePiece BPE ("llama"); does not know where the file came from.

GGUF stores a tokenizer's tables but only *names* how text is cut before merging (`tokenizer.ggml.pre`). What each name
stands for is a fact of the model's original tokenizer.json, and is the table here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from gguf import TokenType
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from jpaged.tokenizer import HFTokenizer
from models.errors import ModelError
from models.gguf_metadata import read_metadata

_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"  # how SentencePiece writes a space

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
# A word that turns to capitals once at most: caps, then small letters (o200k's rule).
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Cut:
    """How text is cut before merging: each pattern in turn cuts what the one before it left, matches and gaps alike."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a piece that is a token is that token, whatever the merges would make of it
    add_bos: bool = False  # when the file does not say


_LLAMA3 = _Cut((rf"{_ENDING}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",), whole_words=True, add_bos=True)
_QWEN2 = _Cut((rf"{_ENDING}|{_WORD}|\p{{N}}|{_REST}",))
_DIGITS = _Cut((r"\p{N}", _GPT2))
_GPT4O = _Cut((rf"{_CASED[0]}{_ENDING}?|{_CASED[1]}{_ENDING}?|\p{{N}}{{1,3}}|{_CASED_REST}",))
_CUTS = {
    "default": _Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Cut((_GPT2,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _GPT4O,
    "tekken": _Cut((rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}",), whole_words=True, add_bos=True),
    "deepseek-v3": _Cut(
        (
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
}


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut for byte-level BPE, by its name in GGUF. Raises ValueError for a name that is not known."""
    if name not in _CUTS:
        raise ValueError(f"tokenizer.ggml.pre = {name!r} is not supported; supported are {', '.join(sorted(_CUTS))}")
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in _CUTS[name].patterns]
    return pre_tokenizers.Sequence(splits)


def from_gguf(path: Path) -> HFTokenizer:
    """The tokenizer in the GGUF file at `path`, chat template and end-of-text ids included.

    Raises:
      ModelError: the file is not whole GGUF, holds no tokenizer, or one of a kind that is not supported.
    """
    metadata = read_metadata(path)
    kind = metadata.get(_PREFIX + "model")
    tokens = metadata.get(_PREFIX + "tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        raise ModelError(
            f"{path} has tokenizer.ggml.model = {kind!r} with {len(tokens or ())} tokens; supported are 'gpt2' "
            "(byte-level BPE) and 'llama' (SentencePiece BPE). Load the model from its Hugging Face folder instead."
        )
    types = metadata.get(_PREFIX + "token_type", [TokenType.NORMAL] * len(tokens))
    build = _byte_level if kind == "gpt2" else _sentencepiece
    try:
        backend, add_bos = build(metadata, tokens, types)
        backend.add_tokens(_added_tokens(tokens, types))
        ends = [metadata.get(f"{_PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")]
        bos = metadata.get(_PREFIX + "bos_token_id")
        return HFTokenizer(
            backend,
            bos_token_id=bos,
            eos_token_ids=[token_id for token_id in ends if token_id is not None],
            chat_template=metadata.get("tokenizer.chat_template"),
            add_bos=bos is not None and metadata.get(_PREFIX + "add_bos_token", add_bos),
        )
    except ValueError as error:
        raise ModelError(f"The tokenizer in {path} cannot be used: {error}") from error


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.get(_PREFIX + "pre", "default")
    pieces, cut = pre_tokenizer(name), _CUTS[name]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_split_merge(merge) for merge in metadata.get(_PREFIX + "merges", ())]
    if strays := [pair for pair in merges if not (pair[0] in ids and pair[1] in ids and "".join(pair) in ids)]:
        raise ValueError(f"{len(strays)} merges use tokens that are not in the vocabulary, such as {strays[0]}")
    backend = tokenizers.Tokenizer(BPE(ids, merges, ignore_merges=cut.whole_words))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pieces, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, cut.add_bos


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece's BPE merges the pair whose joined token scores highest. That is BPE with a rank per pair, once
    every way to split a token into two tokens is listed, best score first (its trainer gives no two tokens that can be
    merged the same score)."""
    scores = metadata.get(_PREFIX + "scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens need as many scores, there are {len(scores or ())}")
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    mergeable = [i for i, kind in enumerate(types) if kind in (TokenType.NORMAL, TokenType.UNUSED)]
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in sorted(mergeable, key=lambda i: -scores[i]))
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in ids and token[cut:] in ids
    ]
    unknown = metadata.get(_PREFIX + "unknown_token_id")
    fallback = TokenType.BYTE in types
    backend = tokenizers.Tokenizer(
        BPE(ids, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=fallback)
    )
    prefixed = metadata.get(_PREFIX + "add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    ends = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return backend, True


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[tokenizers.AddedToken]:
    """Tokens that are found in a text before it is cut: control tokens, which decoding may skip, and the user's."""
    special = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    return [
        tokenizers.AddedToken(token, special=special[TokenType(kind)], normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in special and token
    ]
