"""data.chat_template_kwargs and data.chat_template_path: the same in training, fine-tuning and generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scalerl.config import compose
from scalerl.config.schema import DataConfig, SFTDataConfig
from scalerl.data import DataError, RLHFDataset, SFTDataset, prompt_tokens
from scalerl.data.chat import Conversation, unknown_options, use_chat_template

TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }} {% endif %}"
    "{% for m in messages %}{% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}"
    "{{ m.role }} {{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}short {% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "own.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def test_prompts_take_template_and_variables_in_every_process(write, make_tokenizer, make_row, template) -> None:
    tokenizer = make_tokenizer(None)
    use_chat_template(tokenizer, template)
    path = write([make_row("1 + 1")])
    plain = RLHFDataset(path, tokenizer, DataConfig())[0]
    assert tokenizer.decode(plain.input_ids) == "user 1 + 1<|end|>assistant "
    config = DataConfig(chat_template_kwargs={"enable_thinking": False, "tools": TOOLS})
    assert (
        tokenizer.decode(RLHFDataset(path, tokenizer, config)[0].input_ids) == "add user 1 + 1<|end|>assistant short "
    )
    # A process that tokenizes is given them too.
    messages = [{"role": "user", "content": "1 + 1"}]
    prompt_tokens._start_worker(tokenizer)
    (tokens,) = prompt_tokens._tokenize_in_worker([Conversation(messages)], config.chat_template_kwargs)
    assert tokenizer.decode(tokens.input_ids) == "add user 1 + 1<|end|>assistant short "


def test_conversations_take_them_and_learn_the_reasoning(write, make_tokenizer, template) -> None:
    tokenizer = make_tokenizer(None)
    use_chat_template(tokenizer, template)
    turns = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    config = SFTDataConfig(train_files=None, chat_template_kwargs={"tools": TOOLS})
    row = SFTDataset(write([{"messages": turns}]), tokenizer, config)[0]
    assert tokenizer.decode(row.input_ids) == "add user 1 + 1<|end|>assistant 2<|end|>"
    learned = [token for token, mask in zip(row.input_ids, row.loss_mask, strict=True) if mask]
    assert tokenizer.decode(learned) == "2<|end|>"
    # Keys of messages beside role and content reach the template.
    thoughts = [{"role": "user", "content": "1 + 1", "reasoning_content": "hm"}, turns[1]]
    row = SFTDataset(write([{"messages": thoughts}], "thoughts.parquet"), tokenizer, config)[0]
    assert tokenizer.decode(row.input_ids).startswith("add (hm) user")


def test_thoughts_of_earlier_answers_reach_the_prompts_of_training_and_generation(
    write, prompts_of, make_tokenizer, make_row, template
) -> None:
    """`reasoning_content`. Parquet gives the key to every message; one without a thought has none in the template."""
    tokenizer = make_tokenizer(None)
    use_chat_template(tokenizer, template)
    turns = [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2", "reasoning_content": "hm"},
        {"role": "user", "content": "2 + 2"},
    ]
    shown = [
        "user 1 + 1<|end|>assistant ",
        "user 1 + 1<|end|>(hm) assistant 2<|end|>user 2 + 2<|end|>assistant ",
    ]
    for name in ("thoughts.parquet", "thoughts.jsonl"):
        path = write([make_row() | {"prompt": messages} for messages in (turns[:1], turns)], name)
        rows = RLHFDataset(path, tokenizer, DataConfig())
        assert [tokenizer.decode(rows[i].input_ids) for i in range(2)] == shown
        assert [rows[i].messages for i in range(2)] == [turns[:1], turns]
        prompts = prompts_of(path, tokenizer)
        assert [tokenizer.decode(prompt.input_ids) for prompt in prompts] == shown


def test_changed_by_parquet_nulls_of_other_rows_reach_no_template(write, prompts_of, make_tokenizer, make_row) -> None:
    """Arguments of tool calls that differ from row to row: the text is that of jsonl, in every command."""
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m.role }} {{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )

    def called(name: str, **arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    conversations = [called("weather", city="Paris"), called("add", a=1, b=[2, 3]), called("now")]
    shown: dict[str, list[list[str]]] = {}
    for suffix in ("jsonl", "parquet"):
        path = write([make_row() | {"prompt": messages} for messages in conversations], f"train.{suffix}")
        rows = RLHFDataset(path, tokenizer, DataConfig())
        prompts = prompts_of(path, tokenizer)
        sft = SFTDataset(
            write([{"messages": messages} for messages in conversations], f"sft.{suffix}"),
            tokenizer,
            SFTDataConfig(train_files=None),
        )
        shown[suffix] = [[tokenizer.decode(row.input_ids) for row in map(of.__getitem__, range(3))] for of in
                         (rows, prompts, sft)]  # fmt: skip
    assert shown["parquet"] == shown["jsonl"]
    assert all('{"city": "Paris"}' in texts[0] and "null" not in "".join(texts) for texts in shown["parquet"])


def test_a_row_may_have_tools_of_its_own(write, prompts_of, make_tokenizer, make_row, template, tmp_path) -> None:
    """As a list, of which parquet makes one type for all rows, or as JSON text; a row without has those of all."""
    tokenizer = make_tokenizer(
        "{% for t in tools or [] %}{{ t.function | tojson }} {% endfor %}"
        "{% for m in messages %}{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    own = [
        [{"type": "function", "function": {"name": "sub", "parameters": {"a": 1}}}],
        [{"type": "function", "function": {"name": "div", "strict": True}}],
        None,
    ]
    shown = ['{"name": "sub", "parameters": {"a": 1}} ', '{"name": "div", "strict": true} ', '{"name": "add"} ']
    given = DataConfig(chat_template_kwargs={"tools": TOOLS})
    for name, kept in (("list", own), ("text", [tools and json.dumps(tools) for tools in own])):
        path = write([make_row("1") | {"tools": tools} for tools in kept], f"{name}.parquet")
        rows = RLHFDataset(path, tokenizer, given)
        assert [tokenizer.decode(rows[i].input_ids) for i in range(3)] == [
            f"{tools}user 1<|end|>assistant " for tools in shown
        ]
        assert [rows[i].tools for i in range(3)] == [own[0], own[1], []]
        turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
        path = write([{"messages": turns, "tools": tools} for tools in kept], f"sft_{name}.parquet")
        config = SFTDataConfig(train_files=None, chat_template_kwargs={"tools": TOOLS})
        for row, tools in zip((SFTDataset(path, tokenizer, config)[i] for i in range(3)), shown, strict=True):
            assert tokenizer.decode(row.input_ids) == f"{tools}user 1<|end|>assistant 2<|end|>"
        path = write([{"prompt": turns[:1], "tools": tools} for tools in kept], f"generate_{name}.parquet")
        prompts = prompts_of(path, tokenizer, "data.chat_template_kwargs.tools=[{function:{name:add}}]")
        assert [tokenizer.decode(prompt.input_ids) for prompt in prompts] == [
            f"{tools}user 1<|end|>assistant " for tools in shown
        ]


@pytest.mark.parametrize("tools", ["{", '{"name": "add"}', ["add"]])
def test_tools_that_are_none_are_named(write, make_tokenizer, make_row, template, tools) -> None:
    tokenizer = make_tokenizer(None)
    use_chat_template(tokenizer, template)
    with pytest.raises(DataError, match=r"row 0, column 'tools'.* tools: .*function"):
        RLHFDataset(write([make_row("1") | {"tools": tools}]), tokenizer, DataConfig())


def test_template_that_is_not_there_or_empty_names_the_key(tmp_path: Path, make_tokenizer) -> None:
    tokenizer = make_tokenizer("kept")
    use_chat_template(tokenizer, None)
    assert tokenizer.chat_template == "kept"
    with pytest.raises(DataError, match=r"data.chat_template_path = .*/no.jinja: cannot be read"):
        use_chat_template(tokenizer, str(tmp_path / "no.jinja"))
    (tmp_path / "empty.jinja").touch()
    with pytest.raises(DataError, match="is empty"):
        use_chat_template(tokenizer, str(tmp_path / "empty.jinja"))


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (
            "ppo",
            [
                "data.train_files=t",
                "data.val_files=v",
                "actor_rollout_ref.model.path=m",
                "actor_rollout_ref.rollout.n=2",
            ],
        ),
        ("sft", ["data.train_files=t", "model.path=m"]),
        ("generation", ["data.path=t", "model.path=m", "data.output_path=o.parquet"]),
    ],
)
def test_command_lines_take_single_variables(kind: str, given: list[str]) -> None:
    cfg = compose(kind, [*given, "data.chat_template_kwargs.enable_thinking=false"])
    assert cfg.data.chat_template_kwargs == {"enable_thinking": False}
    if kind == "ppo":
        same = compose(kind, [*given, "+data.apply_chat_template_kwargs.enable_thinking=False"])
        assert same.data.chat_template_kwargs == {"enable_thinking": False}


LEFT_OUT = {
    "message 0 (system)": {"messages": [{"role": "system", "content": "Be terse."}]},
    "message 0 (developer)": {"messages": [{"role": "developer", "content": "Be terse."}]},
    "tool add": {"tools": TOOLS},
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_left_out_by_the_chat_template_is_a_problem_of_the_row(
    what, write, prompts_of, make_tokenizer, make_row, caplog
) -> None:
    """A message or a tool that a template does not write is one that the model would never see."""
    tokenizer = make_tokenizer(
        "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    messages = [*LEFT_OUT[what].get("messages", []), {"role": "user", "content": "1 + 1"}]
    tools = {"tools": LEFT_OUT[what]["tools"]} if "tools" in LEFT_OUT[what] else {}
    prompts = write([make_row("0"), make_row() | {"prompt": messages} | tools], "prompts.jsonl")
    chats = [{"messages": [*messages, {"role": "assistant", "content": "2"}]} | tools]
    conversations = write(chats, "conversations.jsonl")
    for read in (
        lambda keys: RLHFDataset(prompts, tokenizer, DataConfig(**keys)),
        lambda keys: SFTDataset(conversations, tokenizer, SFTDataConfig(train_files=None, **keys)),
    ):
        with pytest.raises(DataError) as error:
            read({})
        (problem,) = error.value.problems
        assert what in problem and "data.unknown_tokens=allow" in problem
        caplog.clear()
        read({"unknown_tokens": "allow"})
        assert what in caplog.text
    caplog.clear()
    prompts_of(prompts, tokenizer)
    assert f"row 1: {what}" in caplog.text


def test_left_out_is_not_what_a_template_writes_in_other_lines_or_in_json(write, make_tokenizer, make_row) -> None:
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m.role }} {% if m.role == 'system' %}{{ m.content | tojson }}"
        "{% else %}{{ m.content | trim | replace('\\n', ' ') }}{% endif %}<|end|>{% endfor %}"
    )
    messages = [{"role": "system", "content": 'Say "so"\nonly.'}, {"role": "user", "content": " 1\n+ 1 \n"}]
    path = write([make_row() | {"prompt": messages}], "prompts.jsonl")
    assert len(RLHFDataset(path, tokenizer, DataConfig())) == 1


def test_special_tokens_in_the_text_of_messages_are_named(write, tokenizer, make_row, caplog) -> None:
    """A prompt that was rendered before it was written to the file gets a second chat template around it."""
    rendered = "<|start|>user\n1 + 1<|end|>\n<|start|>assistant\n"
    RLHFDataset(write([make_row("0"), make_row(rendered)]), tokenizer, DataConfig())
    lines = [line for line in caplog.messages if "row 1:" in line]
    assert len(lines) == 2 and "'<|start|>'" in lines[0] and "'<|end|>'" in lines[1]
    caplog.clear()
    turns = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2<|end|>"}]
    SFTDataset(write([{"messages": turns}], "sft.jsonl"), tokenizer, SFTDataConfig(train_files=None))
    assert [line for line in caplog.messages if "row 0:" in line and "'<|end|>'" in line]


def test_variables_that_the_chat_template_does_not_name_are_said(make_tokenizer) -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    assert unknown_options(tokenizer, {"enable_thinking": False, "tools": TOOLS}) is None
    line = unknown_options(tokenizer, {"enable_thinkin": False, "tools": TOOLS})
    assert line is not None and "enable_thinkin " in line and "tools" not in line
