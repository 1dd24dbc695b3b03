"""Chat templates: the surroundings that templates rely on, and the sandbox."""

import datetime

import pytest

from jpaged.tokenizer import ByteTokenizer, ChatTemplate, ChatTemplateError

MESSAGES = [{"role": "user", "content": "Hi <b>"}]


def render(source: str, messages=MESSAGES, **variables) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{% for m in messages %}[{{ m.role }}|{{ m['content'] }}]{% endfor %}", "<s>[user|Hi <b>]"),
        ("a\n  {% if add_generation_prompt %}\nb\n  {% endif %}\nc", "a\nb\nc"),  # trim_blocks and lstrip_blocks
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <b>"}]'),  # Jinja's own would write \u003cb\u003e
        ("{{ {'é': 1} | tojson(indent=1) }}", '{\n "é": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{{ tools is none and documents is none }}", "True"),
        ("{{ never_given }}|{{ 'x' if never_given is defined }}", "|"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)
def test_surroundings(source, expected):
    assert render(source) == expected


def test_variables_reach_the_template():
    assert render("{{ enable_thinking }} {{ tools[0] }}", enable_thinking=False, tools=["t"]) == "False t"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


def test_date():
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.date.today().year + n) for n in (-1, 0, 1)}


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__base__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
    ],
)
def test_sandbox_blocks(source):
    messages = [dict(MESSAGES[0])]
    with pytest.raises(ChatTemplateError, match="refused the messages"):
        render(source, messages)
    assert messages == MESSAGES


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0] | tojson(indent='x', separators=1) }}", "refused the messages"),
        ("a\n{% if %}", r"does not parse \(line 2\)"),
        ("{% include 'other' %}", "refused the messages"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
    ],
)
def test_errors_carry_the_reason(source, message):
    with pytest.raises(ChatTemplateError, match=f"(?s){message}.* give a prompt instead"):
        render(source)


def test_byte_tokenizer_has_a_template():
    tokenizer = ByteTokenizer()
    assert tokenizer.apply_chat_template(MESSAGES) == "user: Hi <b>\nassistant:"
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == "user: Hi <b>\n"
