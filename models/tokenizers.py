"""The tokenizer that comes with a checkpoint: a GGUF file, a Hugging Face folder, or a folder that `jpaged` saved.

Knows which of a folder's many JSON files says what, and whether a tokenizer and a model belong together. Does not know
how text becomes ids.
"""

from pathlib import Path

import tokenizers

from jpaged.tokenizer import HFTokenizer, Tokenizer
from jpaged.tokenizer.huggingface import EXTRAS_FILE, TOKENIZER_FILE, read_backend
from models.errors import ModelError
from models.sources.fields import Faults, Fields, read_json
from models.tokenizers_gguf import from_gguf

__all__ = ["check_fit", "from_directory", "from_gguf", "load_tokenizer"]

_OTHER_FORMS = ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")
_IDS = range(2**31)  # ids are int32 on the device
_MOST_PERCENT_MORE = 5  # ids than rows of the embedding


def load_tokenizer(path: Path) -> HFTokenizer | None:
    """The tokenizer of the checkpoint at `path` (a GGUF file or a folder); None if the folder has none, so that the
    model runs on ids. Raises ModelError as `from_gguf` and `from_directory` do."""
    return from_directory(path) if path.is_dir() else from_gguf(path)


def check_fit(tokenizer: Tokenizer, vocab_size: int, where: Path) -> str | None:
    """Whether a tokenizer and a model belong together.

    Args:
      tokenizer: the checkpoint's.
      vocab_size: rows of the model's embedding, V.
      where: names the checkpoint in messages.

    Returns:
      A remark if some ids are past the embedding, or None. Checkpoints come so, with a padding token that was added
      later; such an id can be neither given to the model nor sampled.

    Raises:
      ModelError: BOS or EOS is past the embedding, or so many ids are that they are another model's.
    """
    size, faults = tokenizer.vocab_size, []
    sizes = f"it has {size} ids, and the model's embedding has {vocab_size} rows"
    ends = {token_id for token_id in (tokenizer.bos_token_id, *tokenizer.eos_token_ids) if token_id is not None}
    if outside := sorted(token_id for token_id in ends if token_id >= vocab_size):
        faults.append(f"its BOS or EOS {', '.join(map(str, outside))} is past the last row")
    if 100 * size > (100 + _MOST_PERCENT_MORE) * vocab_size:
        faults.append("it is another model's")
    if faults:
        way_out = "give the one that came with the model, or none, and the model runs on token ids"
        raise Faults(f"The tokenizer of {where}", [sizes, *faults], way_out)
    if size > vocab_size:
        return f"The tokenizer of {where}: {sizes}; the last {size - vocab_size} ids cannot be used."
    return None


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
    backend, problems = read_backend(folder / TOKENIZER_FILE), []
    config, special, model, generation = (
        Fields(read_json(folder / name, absent_ok=True), problems, prefix=f"{name}: ")
        for name in ("tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json")
    )
    bos, eos = (_token_id(backend, role, _first_with(role, config, special)) for role in ("bos_token", "eos_token"))
    ends = [eos, *_first_with("eos_token_id", generation, model).integers("eos_token_id", within=_IDS)]
    if bos is None:
        bos = _first_with("bos_token_id", generation, model).integer("bos_token_id", None, within=_IDS)
    add_bos, template = config.flag("add_bos_token", None), _chat_template(folder, config)
    if problems:
        raise Faults(f"The tokenizer in {folder}", problems, "correct the file or fetch it again")
    return HFTokenizer(
        backend,
        bos_token_id=None if bos is None or backend.id_to_token(bos) is None else bos,
        eos_token_ids=[end for end in ends if end is not None and backend.id_to_token(end) is not None],
        chat_template=template,
        add_bos=None if bos is None else add_bos,
    )


def _first_with(name: str, *files: Fields) -> Fields:
    """The first of the files that says something of `name`, or the last."""
    return next((file for file in files if file.has(name)), files[-1])


def _token_id(backend: tokenizers.Tokenizer, role: str, file: Fields) -> int | None:
    """A token is given by its text, or by an object that holds it."""
    held = isinstance(file.raw(role), dict)
    text = file.inner(role).text("content", None) if held else file.text(role, None)
    return None if text is None else backend.token_to_id(text)


def _chat_template(folder: Path, config: Fields) -> str | None:
    path, name = folder / "chat_template.jinja", "chat_template"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read as a template ({error}); fetch it again.") from error
    if not isinstance(config.raw(name), list):
        return config.text(name, None)
    found = {}  # several, by name: {"name": "default", "template": "…"}
    for entry in config.raw(name):
        match entry:
            case {"name": str(key), "template": str(source)}:
                found[key] = source
            case _:
                config.reject(name, "must be a string, or a list of objects with a name and a template")
    return found.get("default")
