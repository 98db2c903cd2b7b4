from __future__ import annotations

import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalerl.config.schema import SFTDataConfig
from scalerl.data import DataError, SFTDataset
from scalerl.data.chat import Conversation
from scalerl.data.problems import FileProblems
from scalerl.data.sft_dataset import _tokenize
from scalerl.data.unknown_text import UnknownText


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


HI = [say("user", "hi"), say("assistant", "hello")]


def learned(tokenizer, row) -> list[str]:
    """The text of each run of tokens with loss_mask 1."""
    texts, run = [], []
    for token, mask in [*zip(row.input_ids, row.loss_mask, strict=True), (0, 0)]:
        if mask:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run))
            run = []
    return texts


def problems_of(path, tokenizer, **changes) -> str:
    with pytest.raises(DataError) as caught:
        SFTDataset(path, tokenizer, SFTDataConfig(**changes))
    return str(caught.value)


def test_only_the_assistant_and_its_end_of_turn_are_learned(write, tokenizer):
    messages = [say("system", "s"), *HI, say("user", "and?"), say("assistant", "bye")]
    row = SFTDataset(write([{"messages": messages}]), tokenizer, SFTDataConfig())[0]
    assert tokenizer.decode(row.input_ids) == (
        "<|start|>system\ns<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\nhello<|end|>\n"
        "<|start|>user\nand?<|end|>\n<|start|>assistant\nbye<|end|>\n"
    )
    assert learned(tokenizer, row) == ["hello<|end|>", "bye<|end|>"]


def test_the_digest_is_that_of_the_messages(write, tokenizer):
    rows = [HI, [say("user", "and?"), say("assistant", "bye")]]
    both, turned, one = (
        SFTDataset(write([{"messages": row} for row in kept]), tokenizer, SFTDataConfig()).digest
        for kept in (rows, rows[::-1], rows[:1])
    )
    again = SFTDataset(write([{"messages": row} for row in rows], "x.jsonl"), tokenizer, SFTDataConfig()).digest
    assert both == again and len({both, turned, one}) == 3


words = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=12).filter(lambda s: s.strip())


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), words), min_size=1, max_size=6))
def test_learned_text_is_the_assistants_text(tokenizer, turns):
    messages = [say("user", "start"), *(say(role, text) for role, text in turns), say("assistant", "end")]
    unknown = UnknownText(tokenizer)
    samples, *unseen = _tokenize(Conversation(messages), 0, tokenizer, SFTDataConfig(), FileProblems("f"), unknown)
    assert samples is not None and unseen == [[], ""]
    (sample,) = samples
    tokens, mask = sample.input_ids, sample.loss_mask
    said = [m["content"] for m in messages if m["role"] == "assistant"]
    picked = [token for token, bit in zip(tokens, mask, strict=True) if bit]
    assert tokenizer.decode(picked) == "".join(f"{text}<|end|>" for text in said)


@pytest.mark.parametrize(
    ("generation_prompt", "expected"),
    [
        # Without one the model has to write the role itself. An end of text inside the answer does not end it.
        ("", "assistant:one<|end|>two\n"),
        ("{% if add_generation_prompt %}assistant:{% endif %}", "one<|end|>two\n"),
    ],
)
def test_a_template_without_end_of_turn_learns_the_whole_turn(write, make_tokenizer, generation_prompt, expected):
    turn = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    tokenizer = make_tokenizer(turn + generation_prompt)
    messages = [say("user", "hi"), say("assistant", "one<|end|>two")]
    row = SFTDataset(write([{"messages": messages}]), tokenizer, SFTDataConfig())[0]
    assert learned(tokenizer, row) == [expected]


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_formats_order_and_pickle(write, tokenizer, suffix):
    texts = [f"answer {i}" for i in range(5)]
    path = write([{"messages": [HI[0], say("assistant", t)], "extra": 1} for t in texts], f"sft{suffix}")
    data = pickle.loads(pickle.dumps(SFTDataset([path, path], tokenizer, SFTDataConfig())))
    assert [learned(tokenizer, data[i]) for i in range(len(data))] == [[f"{t}<|end|>"] for t in texts * 2]


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_cuts_tokens_and_mask_alike(write, tokenizer, side):
    path = write([{"messages": [say("user", "q" * 10), say("assistant", "a" * 30)]}])
    whole = SFTDataset(path, tokenizer, SFTDataConfig())[0]
    cut = SFTDataset(path, tokenizer, SFTDataConfig(max_length=50, truncation=side))[0]
    part = slice(0, 50) if side == "right" else slice(len(whole.input_ids) - 50, None)
    assert cut.input_ids == whole.input_ids[part] and cut.loss_mask == whole.loss_mask[part]
    assert len(whole.input_ids) > 50 == len(cut.input_ids)


def test_overlong_is_an_error_with_rows_and_longest(write, tokenizer):
    rows = [{"messages": [HI[0], say("assistant", "x" * n)]} for n in (1, 200, 100)]
    message = problems_of(write(rows, "sft.parquet"), tokenizer, max_length=60)
    longest = len(SFTDataset(write(rows), tokenizer, SFTDataConfig())[1].input_ids)
    assert "sft.parquet: rows 1, 2, column 'messages'" in message and f"data.max_length={longest}" in message


def test_nothing_left_to_learn_after_truncation(write, tokenizer):
    rows = [{"messages": HI}, {"messages": [say("user", "x" * 100), HI[1]]}]
    message = problems_of(write(rows), tokenizer, max_length=60, truncation="right")
    assert "train.parquet: row 1, column 'messages': found no assistant token in the 60 tokens" in message


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("hi", 'str, not a list of messages ("hi")'),
        ([], "an empty list"),
        ([say("user", "hi")], "no assistant message"),
        ([say("assistant", "hi")], "an assistant message before any other"),
        ([HI[0], say("assistant", "")], "empty content in message 1"),
        ([HI[0], say("gpt", "hi")], 'no known role in message 1 ("gpt")'),
    ],
)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_bad_row_is_named(write, tokenizer, value, problem, suffix):
    rows = [{"messages": value}] if suffix == ".parquet" else [{"messages": HI}, {"messages": value}]
    message = problems_of(write(rows, f"sft{suffix}"), tokenizer)
    assert f"sft{suffix}: row {len(rows) - 1}, column 'messages': found {problem}" in message


# As Qwen3's: after the last question a turn shows its thought, and the last turn an empty one if it has none; turns
# before that question lose theirs.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}"
    "{% set answer = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m['reasoning_content'] if m['reasoning_content'] is string else "
    "(m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m['content'] else '') %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
    "{% endif %}{{ answer }}{% else %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# As DeepSeek-R1's: no turn shows its thought, and the generation prompt opens one.
R1 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|start|>{{ m['content'].split('</think>')[-1] }}<|end|>"
    "{% else %}[{{ m['role'] }}]{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|><think>\n{% endif %}"
)


def thinks(thought: str, answer: str, field: str) -> dict[str, str]:
    """An assistant message with a thought, in its content or in `reasoning_content`."""
    if field == "content":
        return say("assistant", f"<think>\n{thought}\n</think>\n\n{answer}")
    return say("assistant", answer) | {"reasoning_content": thought}


def conversations(write, tokenizer, messages, **changes) -> list[tuple[str, list[str]]]:
    """The conversations that a row with `messages` becomes: what stands before the learned text, and that text."""
    data = SFTDataset(write([{"messages": messages}]), tokenizer, SFTDataConfig(**changes))
    assert data.num_rows == 1
    text_pairs = []
    for row in (data[i] for i in range(len(data))):
        given = row.input_ids[: row.loss_mask.index(1)]
        text_pairs.append((tokenizer.decode(given), learned(tokenizer, row)))
    return text_pairs


@pytest.mark.parametrize("last", [[], [say("user", "more?")]], ids=["ends with an answer", "ends with a question"])
@pytest.mark.parametrize("field", ["content", "reasoning_content"])
@pytest.mark.parametrize("kind", [QWEN3, R1], ids=["qwen3", "r1"])
def test_thoughts_that_the_template_drops_are_learned_where_a_policy_would_have_them(
    write, make_tokenizer, kind, field, last
):
    """Each turn follows exactly the prompt that generation gives for it, thoughts of earlier turns dropped."""
    tokenizer = make_tokenizer(kind)
    turns = [say("user", "hi"), thinks("hm", "hello", field), say("user", "and?"), thinks("so", "bye", field)]
    opened = "" if kind == QWEN3 else "<think>\n"
    shown = "<think>\n" if kind == QWEN3 else ""
    prompts = [tokenizer.apply_chat_template(turns[:n], tokenize=False, add_generation_prompt=True) for n in (1, 3)]
    assert all(prompt.endswith(opened) for prompt in prompts) and "hm" not in prompts[1]
    assert conversations(write, tokenizer, [*turns, *last]) == [
        (prompts[0], [f"{shown}hm\n</think>\n\nhello<|end|>"]),
        (prompts[1], [f"{shown}so\n</think>\n\nbye<|end|>"]),
    ]


def test_turns_without_thoughts_under_such_templates(write, make_tokenizer):
    turns = [*HI, say("user", "and?"), say("assistant", "bye")]
    qwen3 = make_tokenizer(QWEN3)
    prompts = [qwen3.apply_chat_template(turns[:n], tokenize=False, add_generation_prompt=True) for n in (1, 3)]
    empty = "<think>\n\n</think>\n\n"
    assert conversations(write, qwen3, turns) == [
        (prompts[0], [f"{empty}hello<|end|>"]),
        (prompts[1], [f"{empty}bye<|end|>"]),
    ]
    # With enable_thinking=false the generation prompt has the empty thought, so it is not learned.
    assert conversations(write, qwen3, turns, chat_template_kwargs={"enable_thinking": False}) == [
        (prompts[0] + empty, ["hello<|end|>"]),
        (prompts[1] + empty, ["bye<|end|>"]),
    ]
    # R1's turns are the same whatever follows them.
    ((given, answers),) = conversations(write, make_tokenizer(R1), turns)
    assert (given, answers) == ("[user]hi<|start|>", ["hello<|end|>", "bye<|end|>"])


def test_turns_that_stay_as_they_are_share_a_conversation(write, make_tokenizer):
    """Calls of a tool and what follows them keep their thoughts until the next question."""
    tokenizer = make_tokenizer(QWEN3)
    first = [say("user", "hi"), thinks("a", "call", "content"), say("tool", "4"), thinks("b", "four", "content")]
    second = [say("user", "and?"), thinks("c", "call", "content"), say("tool", "5"), thinks("d", "five", "content")]
    assert [answers for _, answers in conversations(write, tokenizer, first + second)] == [
        ["<think>\na\n</think>\n\ncall<|end|>", "<think>\nb\n</think>\n\nfour<|end|>"],
        ["<think>\nc\n</think>\n\ncall<|end|>", "<think>\nd\n</think>\n\nfive<|end|>"],
    ]


def test_lengths_of_a_row_that_becomes_many_conversations(write, make_tokenizer):
    tokenizer = make_tokenizer(QWEN3)
    row = [*HI, say("user", "and?" * 10), say("assistant", "bye" * 10)]
    data = SFTDataset(write([{"messages": row}]), tokenizer, SFTDataConfig())
    longest = max(len(data[i].input_ids) for i in range(len(data)))
    message = problems_of(write([{"messages": row}], "sft.parquet"), tokenizer, max_length=60)
    assert "sft.parquet: row 0, column 'messages'" in message and f"data.max_length={longest}" in message
    # The second conversation has no answer within the limit, as later turns of one conversation would have none.
    assert [answers for _, answers in conversations(write, tokenizer, row, max_length=60, truncation="right")] == [
        ["<think>\n\n</think>\n\nhello<|end|>"]
    ]


def test_a_generation_prompt_that_opens_a_thought_which_turns_do_not_show(write, make_tokenizer):
    template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    thought = "<think>\nhm\n</think>\nbye"
    rows = [{"messages": [*HI, say("user", "and?"), say("assistant", text)]} for text in ("bye", thought)]
    plain, thinking = (SFTDataset(write([row]), tokenizer, SFTDataConfig())[0] for row in rows)
    assert learned(tokenizer, plain) == ["hello<|end|>", "bye<|end|>"]
    # What the prompt gives is not learned where the turn shows it.
    assert learned(tokenizer, thinking) == ["hello<|end|>", "hm\n</think>\nbye<|end|>"]


def test_generation_prompt_that_the_answer_does_not_continue_is_refused(write, make_tokenizer):
    template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    message = problems_of(write([{"messages": HI}]), make_tokenizer(template))
    assert "row 0" in message and "tokens before assistant message 1 change" in message


def test_tokenizer_without_chat_template(write, make_tokenizer):
    assert "no chat template" in problems_of(write([{"messages": HI}]), make_tokenizer(None))
