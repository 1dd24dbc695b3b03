"""Chat templates: Jinja text that comes with a checkpoint and turns messages into a prompt.

A checkpoint is a stranger's file, so its template runs in Jinja's immutable sandbox: no attributes of Python objects,
no change to the messages. The surroundings are those that Hugging Face gives templates (trim_blocks, lstrip_blocks,
break and continue, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, the `generation` block).
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jpaged.tokenizer.protocol import Message

# What a template's own arithmetic on odd messages may raise, beside Jinja's errors.
_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)


class ChatTemplateError(ValueError):
    """A chat template does not parse, refuses the messages, or tried what the sandbox forbids."""


class ChatTemplate:
    """One template, parsed when it is first used.

    Args:
      source: Jinja text.
      special_tokens: names that the template may use, such as {"bos_token": "<s>"}.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt for `messages`. `tools` and `documents` are None unless given among `variables`: templates ask
        whether they are none, not only whether they are defined.

        Raises:
          ChatTemplateError: with the template's own message where it gives one.
        """
        given = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(given, messages=messages, add_generation_prompt=add_generation_prompt)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"The model's chat template does not parse (line {error.lineno}): {error.message}; correct it, or "
                "give a prompt instead of messages."
            ) from error
        except _TEMPLATE_FAULTS as error:
            raise ChatTemplateError(
                f"The model's chat template refused the messages: {error}; change them, or give a prompt instead."
            ) from error

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        return environment.from_string(self.source)


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks what the assistant says, for training masks: here, its content."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
