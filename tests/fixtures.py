"""What several folders of tests share and is costly to make: plain functions, each made once per process.

The default model is fetched as for any user: downloaded once, then found in the cache folder.
"""

import functools
import json
from pathlib import Path
from typing import Any

from jpaged.tokenizer import HFTokenizer
from models.cache import default_cache_dir
from models.default import fetch
from models.tokenizers import from_gguf

GOLDEN = Path(__file__).parent / "data" / "golden"


@functools.cache
def smollm2_gguf() -> Path:
    return fetch(default_cache_dir(), progress=False)


@functools.cache
def smollm2_tokenizer() -> HFTokenizer:
    return from_gguf(smollm2_gguf())


def golden(path: str) -> dict[str, Any]:
    """A file under tests/data/golden, such as "smollm2/france.json"."""
    return json.loads((GOLDEN / path).read_text(encoding="utf-8"))
