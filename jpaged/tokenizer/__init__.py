"""Text in, token ids out, and text again while it is generated.

A model without a tokenizer runs on ids alone; nothing else in `jpaged` needs this package.
"""

from jpaged.tokenizer.bytewise import ByteTokenizer
from jpaged.tokenizer.chat import ChatTemplate, ChatTemplateError
from jpaged.tokenizer.detokenize import IncrementalDetokenizer
from jpaged.tokenizer.huggingface import HFTokenizer
from jpaged.tokenizer.protocol import Message, Tokenizer
from jpaged.tokenizer.stopping import StopChecker, TextStream

__all__ = [
    "ByteTokenizer",
    "ChatTemplate",
    "ChatTemplateError",
    "HFTokenizer",
    "IncrementalDetokenizer",
    "Message",
    "StopChecker",
    "TextStream",
    "Tokenizer",
]
