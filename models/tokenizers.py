"""The tokenizer that comes with a checkpoint: a GGUF file, a Hugging Face folder, or a folder that `jpaged` saved.

Knows which of a folder's many JSON files says what. Does not know how text becomes ids.
"""

import json
from pathlib import Path
from typing import Any

from jpaged.tokenizer import HFTokenizer
from jpaged.tokenizer.huggingface import EXTRAS_FILE, TOKENIZER_FILE, read_backend
from models.errors import ModelError
from models.tokenizers_gguf import from_gguf

__all__ = ["from_directory", "from_gguf", "load_tokenizer"]

_OTHER_FORMS = ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")


def load_tokenizer(path: Path) -> HFTokenizer | None:
    """The tokenizer of the checkpoint at `path` (a GGUF file or a folder); None if the folder has none, so that the
    model runs on ids. Raises ModelError as `from_gguf` and `from_directory` do."""
    return from_directory(path) if path.is_dir() else from_gguf(path)


def from_directory(folder: Path) -> HFTokenizer | None:
    """The tokenizer of a checkpoint folder, or None if it has none.

    From Hugging Face's files: `tokenizer.json`; BOS, its use, the first end-of-text token and the chat template from
    `tokenizer_config.json`; a template in `chat_template.jinja` goes before that one; more end-of-text ids from
    `generation_config.json`, or from `config.json` where that has none.

    Raises:
      ModelError: a file is damaged, or the tokenizer is there only in a form that is not supported.
    """
    try:
        if (folder / EXTRAS_FILE).exists():
            return HFTokenizer.load(folder)
        if (folder / TOKENIZER_FILE).exists():
            return _from_hugging_face(folder)
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"The tokenizer in {folder} cannot be used: {error}") from error
    if others := [name for name in _OTHER_FORMS if (folder / name).exists()]:
        raise ModelError(
            f"{folder} has its tokenizer only as {', '.join(others)}; {TOKENIZER_FILE} is wanted. Make it with "
            f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})."
        )
    return None


def _from_hugging_face(folder: Path) -> HFTokenizer:
    backend = read_backend(folder / TOKENIZER_FILE)
    names = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    numbers = _read_json(folder / "config.json") | _read_json(folder / "generation_config.json")

    def token_id(role: str) -> int | None:
        name = names.get(role)
        content = name.get("content") if isinstance(name, dict) else name
        return None if content is None else backend.token_to_id(content)

    bos, ends = token_id("bos_token"), numbers.get("eos_token_id")
    ends = [token_id("eos_token"), *(ends if isinstance(ends, list) else [ends])]
    bos = numbers.get("bos_token_id") if bos is None else bos
    return HFTokenizer(
        backend,
        bos_token_id=None if bos is None or backend.id_to_token(bos) is None else bos,
        eos_token_ids=[end for end in ends if end is not None and backend.id_to_token(end) is not None],
        chat_template=_chat_template(folder, names.get("chat_template")),
        add_bos=None if bos is None else names.get("add_bos_token"),
    )


def _chat_template(folder: Path, configured: str | list[dict[str, str]] | None) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    if isinstance(configured, list):  # several, by name: {"name": "default", "template": "…"}
        return {entry["name"]: entry["template"] for entry in configured}.get("default")
    return configured


def _read_json(path: Path) -> dict[str, Any]:
    """An absent file says nothing. Nulls are dropped, so that they hide no other file's value."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__} where an object is wanted; fetch it again.")
    return {key: entry for key, entry in value.items() if entry is not None}
