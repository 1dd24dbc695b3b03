"""Converts a checkpoint into a directory that loads fast, onto any number of devices.

    python scripts/convert.py --source=Llama-3.2-1B-Instruct --target=llama      a Hugging Face directory
    python scripts/convert.py --source=SmolLM2.Q4_1.gguf --target=smollm2        a GGUF file
    python scripts/convert.py --source=big.gguf --target=big --dtype=bfloat16    half the size of float32
    python scripts/decode.py --model=smollm2                                     what it is for

decode.py converts by itself what it is given, into the cache folder; this script is for choosing where, and in which
precision. Families: llama (Llama 2 and 3, SmolLM2, and what else has their architecture). A Hugging Face directory has
config.json and safetensors files. A GGUF file may be quantised in any of the usual ways, and is dequantised.

The target appears whole or not at all, Ctrl-C included; converting again is done at once. In it are config.json,
conversion.json (what it came from), weights/ (an Orbax checkpoint) and the tokenizer. Exit status: 0, it is there; 2,
something was wrong; 130, Ctrl-C.
"""

from __future__ import annotations

import os

from absl import flags

from common import command, interrupt

_SOURCE = flags.DEFINE_string("source", None, "What to convert: a Hugging Face directory or a GGUF file.")
_TARGET = flags.DEFINE_string("target", None, "The directory to make: new, empty, or an earlier conversion of this.")
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "auto",
    ["auto", "float32", "bfloat16"],
    "Precision of the stored weights; auto keeps the source's (bfloat16 stays; float16 and quantised become float32).",
)

GROUPS = {"Conversion": ("source", "target", "dtype"), "Output": ("verbose",)}


def main() -> int:
    source, target = _SOURCE.value, _TARGET.value
    if not source or not target:
        raise ValueError(f"{source=} and {target=} must both be given; try --help")
    if not os.path.exists(os.path.expanduser(source)):  # here too, because nobody should wait for jax to learn it
        raise ValueError(f"There is no {source}; give a Hugging Face directory or a GGUF file.")

    with interrupt.leaving_at_once():
        import jax  # here, because --help should not wait for it

    jax.config.update("jax_platforms", "cpu")  # no accelerator is needed, and one may be busy serving
    from models.convert import convert
    from models.paths import expand_home

    convert(expand_home(source), expand_home(target), dtype=None if _DTYPE.value == "auto" else _DTYPE.value)
    print(target)
    return command.OK


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
