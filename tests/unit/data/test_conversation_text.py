"""Responses of several turns as text: roles, and what is masked."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl.data.conversation_text import ConversationText
from tests.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
# As Qwen's: results of tools are the user's, several in one message.
WITH_TOOLS = (
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% else %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"


def of_parts(template: Any, *parts: tuple[str, bool], with_special_tokens: bool = False) -> list[str]:
    """The lines of a response.  parts: text, and whether the policy sampled it."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    ids, is_sampled = [], []
    for text, sampled in parts:
        new = tokenizer.encode(text, add_special_tokens=False)
        ids += new
        is_sampled += [sampled] * len(new)
    texts = ConversationText(tokenizer, None, with_special_tokens=with_special_tokens)
    return texts.of(ids, is_sampled).split("\n")


@pytest.mark.parametrize("template", [TOKENIZER.chat_template, WITH_TOOLS])
def test_a_conversation_has_roles_and_says_what_is_masked(template: str) -> None:
    call = '<tool_call>{"name": "add"}</tool_call>'
    tool = (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>"
        if template is WITH_TOOLS
        else ("\n<|im_start|>tool\n4")
    )
    turns = [
        (f"{call}<|im_end|>", True),
        (f"{tool}{ASSISTANT}", False),
        ("é is four<|im_end|>", True),
        (f"\n<|im_start|>user\nsure?\n\nyes?{ASSISTANT}", False),
        ("four", True),
    ]
    shown = ["[assistant]", call, "[tool, masked]", "4", "[assistant]", "é is four", "[user, masked]", "sure?", ""]
    assert of_parts(template, *turns) == [*shown, "yes?", "[assistant]", "four"]


def test_results_of_several_tools_are_apart() -> None:
    results = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in (4, 5))
    shown = of_parts(
        WITH_TOOLS, ("two<|im_end|>", True), (f"\n<|im_start|>user{results}{ASSISTANT}", False), ("9", True)
    )
    assert shown == ["[assistant]", "two", "[tool, masked]", "4", "[tool, masked]", "5", "[assistant]", "9"]


def test_turns_that_another_trajectory_trains_are_masked() -> None:
    shared = (f"a0<|im_end|>\n<|im_start|>user\nwhy?{ASSISTANT}", False)
    shown = of_parts(TOKENIZER.chat_template, shared, ("so<|im_end|>", True))
    assert shown == ["[assistant, masked]", "a0", "[user, masked]", "why?", "[assistant]", "so"]


def test_marks_that_the_policy_writes_are_its_text() -> None:
    written = f"a0<|im_end|>\n<|im_start|>user\nwhy?{ASSISTANT}so<|im_end|>"
    asked = (f"\n<|im_start|>user\nand?{ASSISTANT}", False)
    shown = of_parts(TOKENIZER.chat_template, (written, True), asked, ("yes", True), with_special_tokens=True)
    text = written.removesuffix("<|im_end|>").split("\n")
    assert shown == ["[assistant]", *text, "[user, masked]", "and?", "[assistant]", "yes"]


@pytest.mark.parametrize("template", [None, "{% for message in messages %}{{ message.content }}\n{% endfor %}"])
def test_without_marks_all_is_the_policys(template: str | None) -> None:
    """Also where a program writes into an answer, without a message."""
    shown = of_parts(template, ("3+4", True), ("=7", False), ("\nso", True))
    assert shown == ["[assistant]", "3+4", "[assistant, masked]", "=7", "[assistant]", "so"]
