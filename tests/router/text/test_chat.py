import time
from datetime import datetime

import pytest

from holdfast.router.chat import Chat
from holdfast.router.text.chat import chat_text, render_chat
from holdfast.worker.errors import ConfigurationError, InvalidRequestError
from scripts.train_bundled_model.vocabulary import CHAT_TEMPLATE
from tests.fakes import byte_tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def test_renders_messages_and_the_opening_of_the_answer() -> None:
    assert render_chat(CHATML, HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(CHATML, HELLO, add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"


@pytest.mark.parametrize("template", [CHATML, CHAT_TEMPLATE])
@pytest.mark.parametrize("opening", [True, False])
def test_agrees_with_transformers(template: str, opening: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "system", "content": "Be <kind> & brief."},
        {"role": "user", "content": " Hello 👋\n"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "{{ 7 * 7 }}"},
    ]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=opening, **special)
    assert render_chat(template, messages, opening, special_tokens=special) == theirs[0]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hello</s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hello"}]'),
        ("{{ {'a': '<b>'} | tojson(indent=2) }}", '{\n  "a": "<b>"\n}'),
        ("{{ strftime_now('%d %B %Y') }}", "29 February 2024"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}kept{% endgeneration %}", "kept"),
        ("{% if tools is not none or documents %}tools{% endif %}none", "none"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)
def test_templates_find_the_helpers_they_expect(template: str, expected: str) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered = render_chat(template, HELLO, special_tokens=special, now=lambda: datetime(2024, 2, 29))
    assert rendered == expected


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hello",
        {"role": "user", "content": "Hello"},
        ["Hello"],
        [{"content": "Hello"}],
        [{"role": "user"}],
        [{"role": "user", "content": 7}],
        [{"role": 1, "content": "Hello"}],
        [{"role": "user|><|assistant", "content": "Hello"}],
    ],
)
def test_refuses_malformed_messages(messages: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render_chat(CHATML, messages)  # type: ignore[arg-type]
    assert caught.value.field.startswith("chat.messages")


def test_passes_on_what_the_template_says_against_a_message() -> None:
    with pytest.raises(InvalidRequestError, match="not critic") as caught:
        render_chat(CHAT_TEMPLATE, [{"role": "critic", "content": "7"}], special_tokens={"bos_token": ""})
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize("template", ["{{ messages[0].content + 1 }}", "{{ messages[7].content.text }}", "{{ 1 / 0 }}"])
def test_a_template_that_fails_is_an_error_of_the_request(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="template"):
        render_chat(template, HELLO)


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.__base__.__subclasses__() }}"],
)
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="template"):
        render_chat(template, HELLO)


def test_a_template_cannot_change_the_messages() -> None:
    messages = [{"role": "user", "content": "Hello", "tags": ["a"]}]
    with pytest.raises(InvalidRequestError):
        render_chat("{{ messages[0].update(content='Bye') }}", messages)
    with pytest.raises(InvalidRequestError):
        render_chat("{{ messages[0].tags.append('b') }}", messages)
    assert messages == [{"role": "user", "content": "Hello", "tags": ["a"]}]


def test_a_request_may_set_variables_but_none_that_the_template_is_given() -> None:
    assert render_chat("{{ mood }}{{ n + 1 }}", HELLO, template_kwargs={"mood": "calm", "n": 1}) == "calm2"
    assert render_chat(CHATML, HELLO, template_kwargs={"add_generation_prompt": False}).endswith("<|im_end|>\n")
    for name in ("messages", "strftime_now", "bos_token"):
        with pytest.raises(InvalidRequestError, match=name) as caught:
            render_chat(CHATML, HELLO, special_tokens={"bos_token": "<s>"}, template_kwargs={name: "x"})
        assert caught.value.field == "chat.template_kwargs"


def test_a_chat_that_says_when_it_is_has_one_prompt_wherever_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer(chat_template="{{ strftime_now('%d %b %H:%M') }}")
    for zone in ("Pacific/Auckland", "America/Los_Angeles"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert chat_text(tokenizer, Chat(messages=HELLO, now_s=86_399)) == "01 Jan 23:59"
    monkeypatch.delenv("TZ")
    time.tzset()


def test_a_template_that_does_not_compile_is_the_models_fault() -> None:
    with pytest.raises(ConfigurationError, match="line 2"):
        render_chat("fine\n{% for %}", HELLO)


def test_says_that_a_model_without_template_takes_no_chats() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        render_chat(None, HELLO)
