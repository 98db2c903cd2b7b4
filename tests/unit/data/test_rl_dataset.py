from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.config.schema import DataConfig
from scalerl.data import DataError, RLHFDataset, prompt_tokens
from scalerl.data import files as files_module
from tests.lanes import full


def problems_of(data_files, tokenizer, config=None, **kwargs) -> str:
    with pytest.raises(DataError) as caught:
        RLHFDataset(data_files, tokenizer, config or DataConfig(), **kwargs)
    return str(caught.value)


# --- what comes out


def test_row_has_the_template_tokens_and_every_column(write, tokenizer, make_row):
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "1 + 1 = ü?"}]
    path = write([make_row(), make_row(prompt=messages, truth="2", extra_info={"split": "train", "index": 7})])
    row = RLHFDataset(path, tokenizer, DataConfig())[1]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert row.input_ids == expected
    assert tokenizer.decode(row.input_ids).endswith("<|end|>\n<|start|>assistant\n")
    assert (row.uid, row.prompt_length_before) == (1, len(expected))
    assert (row.data_source, row.ground_truth) == ("arithmetic", "2")
    assert row.extra_info == {"split": "train", "index": 7}
    assert row.messages == messages


def test_the_digest_is_that_of_the_messages(write, tokenizer, make_tokenizer, make_row):
    """Whatever the file's format, the template and the rest of the row; of the rows that are kept, in their order."""

    def digest(texts, name="train.parquet", tokenizer=tokenizer, truth="4", **options):
        return RLHFDataset(write([make_row(t, truth) for t in texts], name), tokenizer, DataConfig(), **options).digest

    expected = digest(["a", "b"])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    same = [
        digest(["a", "b"], "train.jsonl"),
        digest(["a", "b"], tokenizer=make_tokenizer(template)),
        digest(["a", "b"], truth="corrected"),
        digest(["a", "b", "c"], max_samples=2),
    ]
    assert same == [expected] * 4
    others = [digest(texts) for texts in (["b", "a"], ["a", "B"], ["ab"], ["a", "b", "b"])]
    assert len({expected, *others}) == 5


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_every_format_gives_the_same_rows(write, tokenizer, make_row, suffix):
    rows = [make_row("a"), make_row("b", extra_info=None), make_row("c", truth="3")]
    data = RLHFDataset(write(rows, f"train{suffix}"), tokenizer, DataConfig())
    assert [row.messages[0]["content"] for row in data] == ["a", "b", "c"]
    assert [row.ground_truth for row in data] == ["4", "4", "3"]
    assert [row.extra_info for row in data] == [{"split": "train", "index": 0}, {}, {"split": "train", "index": 0}]


def test_json_lines_in_a_json_file_with_bom_and_blank_lines(tmp_path, write, tokenizer, make_row):
    lines = Path(write([make_row("a"), make_row("b")], "x.jsonl")).read_text()
    path = tmp_path / "lines.json"
    path.write_bytes(b"\xef\xbb\xbf\n\n" + lines.replace("\n", "\n\n").encode())
    assert len(RLHFDataset(path, tokenizer, DataConfig())) == 2


def test_order_of_files_and_rows_over_chunk_borders(write, tokenizer, make_row, monkeypatch):
    monkeypatch.setattr(files_module, "CHUNK_ROWS", 3)
    texts = [f"row {i}" for i in range(10)]
    # In the order given, not by name; one file twice counts twice.
    one = write([make_row(text) for text in texts[:7]], "z.parquet")
    two = write([make_row(text) for text in texts[7:]], "a.jsonl")
    data = RLHFDataset([one, two, one], tokenizer, DataConfig())
    assert [row.messages[0]["content"] for row in data] == texts + texts[:7]
    assert [row.uid for row in data] == list(range(17))


def test_renamed_columns_and_further_columns(write, tokenizer, make_row):
    row = make_row("hi") | {"unused": 1}
    row["question"], row["source"] = row.pop("prompt"), row.pop("data_source")
    config = DataConfig(prompt_key="question", reward_fn_key="source")
    assert RLHFDataset(write([row]), tokenizer, config)[0].data_source == "arithmetic"


def test_ground_truth_keeps_its_type(write, tokenizer, make_row):
    truths = [7, 2.5, ["a", "b"], {"tests": ["x"]}]
    data = RLHFDataset(write([make_row(truth=t) for t in truths], "t.jsonl"), tokenizer, DataConfig())
    assert [row.ground_truth for row in data] == truths


def test_ground_truth_may_be_null_for_a_model_judge(write, tokenizer, make_row):
    row = make_row(reward_model={"style": "model", "ground_truth": None})
    assert RLHFDataset(write([row]), tokenizer, DataConfig())[0].ground_truth is None


def test_null_keys_that_parquet_adds_to_messages_do_not_reach_the_template(write, make_tokenizer, make_row):
    template = "{% for m in messages %}{% if 'name' in m %}[{{ m['name'] }}]{% endif %}{{ m['content'] }}{% endfor %}"
    rows = [
        make_row(prompt=[{"role": "user", "content": "a", "name": "bob"}]),
        make_row(prompt=[{"role": "user", "content": "b"}]),
    ]
    tokenizer = make_tokenizer(template)
    data = RLHFDataset(write(rows), tokenizer, DataConfig())
    assert [tokenizer.decode(row.input_ids) for row in data] == ["[bob]a", "b"]


def test_rows_of_one_uid_are_independent_copies(write, tokenizer, make_row):
    data = RLHFDataset(write([make_row()]), tokenizer, DataConfig())
    data[0].extra_info["index"] = 99
    data[0].input_ids.clear()
    assert data[0].extra_info["index"] == 0 and data[0].input_ids


def test_pickles_whole_and_small(write, tokenizer, make_row):
    rows = [make_row("x" * 400, extra_info={"split": "train", "index": i}) for i in range(200)]
    data = RLHFDataset(write(rows), tokenizer, DataConfig())
    packed = pickle.dumps(data, protocol=5)
    copy = pickle.loads(packed)
    assert [copy[i] for i in range(200)] == [data[i] for i in range(200)]
    num_tokens = sum(len(row.input_ids) for row in data)
    # 4 bytes a token, the text once, and nothing of the tokenizer.
    assert len(packed) < 4 * num_tokens + 200 * (400 + 400)


# --- max_samples, filter, truncation


def test_max_samples_takes_the_first_kept_rows(write, tokenizer, make_row):
    one = write([make_row("a"), make_row("b" * 500), make_row("c")], "1.parquet")
    two = write([make_row("d"), make_row("e")], "2.parquet")
    config = DataConfig(max_prompt_length=100, filter_overlong_prompts=True)
    data = RLHFDataset([one, two], tokenizer, config, max_samples=3)
    assert [row.messages[0]["content"] for row in data] == ["a", "c", "d"]
    assert (len(data), data.num_filtered) == (3, 1)


@pytest.mark.parametrize("chunk_rows", [1, 100])
def test_rows_after_max_samples_are_still_checked(write, tokenizer, make_row, monkeypatch, chunk_rows):
    monkeypatch.setattr(files_module, "CHUNK_ROWS", chunk_rows)
    path = write([make_row("a"), make_row("b"), make_row("c"), make_row(prompt=[])], "1.jsonl")
    assert "row 3, column 'prompt'" in problems_of(path, tokenizer, max_samples=1)


def test_filter_counts_and_keeps_order_and_uids_dense(write, tokenizer, make_row, caplog):
    rows = [make_row("x" * n, truth=str(n)) for n in (5, 300, 6, 300, 300, 7)]
    data = RLHFDataset(write(rows), tokenizer, DataConfig(max_prompt_length=100, filter_overlong_prompts=True))
    assert [row.ground_truth for row in data] == ["5", "6", "7"]
    assert [row.uid for row in data] == [0, 1, 2]
    assert data.num_filtered == 3
    assert "3 of 6 prompts dropped" in caplog.text


def test_a_prompt_of_exactly_the_limit_is_kept(write, tokenizer, make_row):
    path = write([make_row("x" * 20)])
    length = len(RLHFDataset(path, tokenizer, DataConfig())[0].input_ids)
    filtering = DataConfig(max_prompt_length=length, filter_overlong_prompts=True)
    assert RLHFDataset(path, tokenizer, filtering).num_filtered == 0
    assert len(RLHFDataset(path, tokenizer, DataConfig(max_prompt_length=length))) == 1
    assert f"max_prompt_length={length - 1} tokens ({length} tokens)" in problems_of(
        path, tokenizer, DataConfig(max_prompt_length=length - 1)
    )


@pytest.mark.parametrize("max_length", [10, 11])
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncation(write, tokenizer, make_row, side, max_length):
    path = write([make_row("abcdefghijklmnopqrstuvwxyz"), make_row("a")])
    whole = RLHFDataset(path, tokenizer, DataConfig())[0].input_ids
    row = RLHFDataset(path, tokenizer, DataConfig(max_prompt_length=max_length, truncation=side))[0]
    expected = {
        "left": whole[-max_length:],
        "right": whole[:max_length],
        "middle": whole[:5] + whole[-(max_length - 5) :],
    }
    assert row.input_ids == expected[side]
    assert row.prompt_length_before == len(whole)


def test_overlong_prompts_are_one_error_with_all_rows_and_the_longest(write, tokenizer, make_row):
    rows = [make_row("x" * n) for n in (5, 200, 6, 300, 250)]
    message = problems_of(write(rows), tokenizer, DataConfig(max_prompt_length=100))
    longest = len(RLHFDataset(write(rows), tokenizer, DataConfig())[3].input_ids)
    assert "train.parquet: rows 1, 3, 4, column 'prompt'" in message
    assert "data.max_prompt_length=100" in message
    assert f"set data.max_prompt_length={longest}" in message
    assert "data.truncation=left|right|middle" in message and "filter_overlong_prompts=true" in message


def test_everything_filtered_is_an_error_with_the_count(write, tokenizer, make_row):
    config = DataConfig(max_prompt_length=5, filter_overlong_prompts=True)
    assert "all 2 prompts are longer" in problems_of(write([make_row(), make_row()]), tokenizer, config)


# --- images


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_images_without_a_processor_name_rows_and_column(write, tokenizer, make_row, suffix):
    rows = [make_row() | {"images": images} for images in ([], ["a.png"], None, ["b.png", "c.png"])]
    message = problems_of(write(rows, f"train{suffix}"), tokenizer)
    assert (
        f"train{suffix}: rows 1, 3, column 'images': found images, for a model without a vision part (1 of" in message
    )
    assert "data.image_key" in message


# --- several processes


@pytest.fixture
def many(write, make_row, monkeypatch):
    """Three files in chunks of 4 rows, every fifth prompt over 100 tokens."""
    monkeypatch.setattr(files_module, "CHUNK_ROWS", 4)
    rows = [make_row("x" * (200 if i % 5 == 0 else i), truth=str(i)) for i in range(1, 40)]
    return [write(rows[:15], "a.parquet"), write(rows[15:17], "b.jsonl"), write(rows[17:], "c.json")]


@pytest.mark.parametrize("max_samples", [14, full(-1)])
def test_the_rows_do_not_depend_on_the_number_of_processes(many, tokenizer, caplog, max_samples):
    def read(workers: int) -> RLHFDataset:
        config = DataConfig(
            max_prompt_length=100, filter_overlong_prompts=True, filter_overlong_prompts_workers=workers
        )
        return RLHFDataset(many, tokenizer, config, max_samples=max_samples)

    one, two = read(1), read(2)
    assert list(one) == list(two) and (one.num_filtered, one.files) == (two.num_filtered, two.files)
    assert (len(one), one.num_filtered) == {-1: (32, 7), 14: (14, 3)}[max_samples]
    assert caplog.text.count(f"{one.num_filtered} of {len(one) + one.num_filtered} prompts dropped") == 2


def end_the_process(*_: object) -> None:
    os._exit(3)


@pytest.mark.full
def test_a_lost_process_is_a_clear_error(write, make_tokenizer, make_row, monkeypatch):
    monkeypatch.setattr(files_module, "CHUNK_ROWS", 1)
    monkeypatch.setattr(prompt_tokens, "_tokenize_in_worker", end_the_process)
    config = DataConfig(filter_overlong_prompts_workers=2)
    message = problems_of(write([make_row()] * 3), make_tokenizer(), config)
    assert "one of 2 tokenizing processes was lost" in message and "filter_overlong_prompts_workers" in message


# --- bad files


@pytest.mark.parametrize("column", ["data_source", "prompt", "ability", "reward_model", "extra_info"])
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_missing_column(write, tokenizer, make_row, column, suffix):
    rows = [make_row(), make_row()]
    for row in rows:
        del row[column]
    message = problems_of(write(rows, f"train{suffix}"), tokenizer)
    assert f"train{suffix}: " in message and f"column '{column}'" in message
    assert message.count("found no such") == 1


def test_missing_column_names_the_near_one_and_does_not_hide_other_problems(write, tokenizer, make_row):
    rows = [make_row(), make_row(data_source="")]
    for row in rows:
        row["prompts"] = row.pop("prompt")
    message = problems_of(write(rows), tokenizer)
    assert "column 'prompt': found no such column" in message and "rename 'prompts'" in message
    assert "row 1, column 'data_source': found empty text" in message


@pytest.mark.parametrize(
    ("change", "column", "problem"),
    [
        ({"data_source": 3}, "data_source", "int, not text (3)"),
        ({"data_source": None}, "data_source", "null, not text"),
        ({"data_source": ""}, "data_source", "empty text"),
        ({"ability": ["math"]}, "ability", 'list, not text (["math"])'),
        ({"ability": None}, "ability", "null, not text"),
        ({"prompt": "What is 2 + 2?"}, "prompt", 'str, not a list of messages ("What is 2 + 2?")'),
        ({"prompt": None}, "prompt", "null, not a list of messages"),
        ({"prompt": []}, "prompt", "an empty list"),
        ({"prompt": ["hello"]}, "prompt", 'str as message 0 ("hello")'),
        ({"prompt": [{"role": "user", "content": ""}]}, "prompt", "empty content in message 0"),
        ({"prompt": [{"role": "user", "content": " \n"}]}, "prompt", "empty content in message 0"),
        ({"prompt": [{"role": "user", "content": 5}]}, "prompt", "int as content of message 0, not text (5)"),
        ({"prompt": [{"role": "user"}]}, "prompt", "null as content of message 0"),
        ({"prompt": [{"content": "hi"}]}, "prompt", "null as role of message 0"),
        ({"prompt": [{"role": "human", "content": "hi"}]}, "prompt", 'no known role in message 0 ("human")'),
        ({"reward_model": "4"}, "reward_model", 'str, not a dict ("4")'),
        ({"reward_model": None}, "reward_model", "null, not a dict"),
        ({"reward_model": {"style": "rule"}}, "reward_model", "no key 'ground_truth' (it has: style)"),
        ({"reward_model": {"ground_truth": "4"}}, "reward_model", "no key 'style' (it has: ground_truth)"),
        ({"reward_model": {"style": 1, "ground_truth": "4"}}, "reward_model", "int as style"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "reward_model", "null as ground_truth"),
        ({"reward_model": {"style": "rule", "ground_truth": float("nan")}}, "reward_model", "nan in ground_truth"),
        ({"reward_model": {"style": "x", "ground_truth": [[1.0, -float("inf")]]}}, "reward_model", "-inf in ground_"),
        ({"extra_info": "train"}, "extra_info", 'str, not a dict ("train")'),
    ],
)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_bad_value(write, tokenizer, make_row, change, column, problem, suffix):
    # A parquet column has one type, so there every row has it.
    rows = [make_row(**change)] if suffix == ".parquet" else [make_row(), make_row(**change)]
    row = len(rows) - 1
    message = problems_of(write(rows, f"train{suffix}"), tokenizer)
    assert f"train{suffix}: row {row}, column '{column}': found {problem}" in message
    assert "; " in message.rsplit("found ", 1)[1], "the message says what to do"


def test_all_problems_of_a_file_come_at_once_grouped(write, tokenizer, make_row):
    rows = [make_row() for _ in range(12)]
    for i in range(2, 10):
        rows[i]["prompt"] = []
    rows[3]["data_source"] = 1
    rows[11]["reward_model"] = {"style": "rule"}
    message = problems_of(write(rows, "train.jsonl"), tokenizer)
    assert message.startswith("3 problems in the data:")
    assert "rows 2, 3, 4, 5, 6 and 3 more, column 'prompt': found an empty list" in message
    assert "row 3, column 'data_source'" in message
    assert "row 11, column 'reward_model'" in message


def test_at_most_twenty_problems_are_shown(write, tokenizer, make_row):
    bad_reward_models = [{"style": "rule", f"key{i}": 0} for i in range(50)]
    rows = [make_row(reward_model=value) for value in bad_reward_models]
    with pytest.raises(DataError) as caught:
        RLHFDataset(write(rows, "train.jsonl"), tokenizer, DataConfig())
    assert len(caught.value.problems) == 21
    assert "stopped at 20 problems" in caught.value.problems[-1]


def test_problem_in_a_later_chunk_names_the_row_of_the_file(write, tokenizer, make_row, monkeypatch):
    monkeypatch.setattr(files_module, "CHUNK_ROWS", 4)
    rows = [make_row() for _ in range(10)]
    rows[9]["prompt"] = []
    for name in ("t.parquet", "t.jsonl", "t.json"):
        assert f"{name}: row 9, column 'prompt'" in problems_of(write(rows, name), tokenizer)


def test_missing_files_are_named_all_at_once(write, tokenizer, make_row, tmp_path):
    good = write([make_row()])
    message = problems_of([tmp_path / "no1.parquet", good, tmp_path / "no2.parquet", tmp_path], tokenizer)
    assert "no1.parquet does not exist" in message and "no2.parquet does not exist" in message
    assert f"{tmp_path} is a directory" in message


def test_file_that_is_no_parquet(tmp_path, tokenizer):
    (tmp_path / "train.parquet").write_text("not parquet at all")
    message = problems_of(str(tmp_path / "train.parquet"), tokenizer)
    assert "train.parquet: found a file that is not readable parquet" in message


def test_bad_json_line_names_row_and_line(write, tokenizer, make_row):
    path = Path(write([make_row(), make_row()], "train.jsonl"))
    path.write_text(path.read_text() + '\n{"data_source": \n[1]\n')
    message = problems_of(path, tokenizer)
    assert "train.jsonl: row 2: found a line that is not valid JSON (line 4:" in message
    assert "train.jsonl: row 3: found list" in message


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_bad_json_with_a_key_twice_has_no_last_value(tmp_path, tokenizer, make_row, name):
    """A dict would have the last value alone, whichever of the two answers that is."""
    row = json.dumps(make_row("2 + 2 =", "4")).replace(
        '"ground_truth": "4"', '"ground_truth": "4", "ground_truth": "5"'
    )
    (tmp_path / name).write_text(row if name == "train.jsonl" else f"[{row}]")
    message = problems_of(tmp_path / name, tokenizer)
    assert "not valid JSON" in message and "the key 'ground_truth' occurs twice" in message


def test_parquet_text_that_is_not_utf8(write, tokenizer, make_row):
    table = pa.Table.from_pylist([make_row(), make_row()])
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"\xff\xfe"]).buffers())
    table = table.set_column(table.schema.get_field_index("ability"), "ability", broken)
    assert "row 1, column 'ability': found text that is not UTF-8" in problems_of(write(table), tokenizer)


def test_two_columns_of_one_name(tmp_path, tokenizer, make_row):
    table = pa.Table.from_pylist([make_row()])
    table = table.append_column("ability", pa.array(["again"]))
    pq.write_table(table, tmp_path / "train.parquet")
    assert "column 'ability': found 2 columns" in problems_of(tmp_path / "train.parquet", tokenizer)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_file_without_rows(write, tokenizer, make_row, suffix):
    rows = pa.Table.from_pylist([make_row()]).slice(0, 0) if suffix == ".parquet" else []
    assert f"empty{suffix}: no rows" in problems_of(write(rows, f"empty{suffix}"), tokenizer)


# --- bad templates


@pytest.mark.parametrize("workers", [1, full(2)])
def test_template_that_refuses_a_row_names_it(write, make_tokenizer, make_row, monkeypatch, workers):
    monkeypatch.setattr(files_module, "CHUNK_ROWS", 2)
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    rows = [make_row() for _ in range(5)] + [make_row(prompt=[{"role": "system", "content": "s"}])]
    message = problems_of(write(rows), make_tokenizer(template), DataConfig(filter_overlong_prompts_workers=workers))
    assert "train.parquet: row 5, column 'prompt': found messages that the chat template refuses" in message
    assert "no system role" in message


def test_data_error_survives_pickle(write, tokenizer, make_row):
    with pytest.raises(DataError) as caught:
        RLHFDataset(write([make_row(prompt=[])], "t.jsonl"), tokenizer, DataConfig())
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and copy.problems == caught.value.problems


def test_no_answer_bytes(write, tokenizer, make_row):
    message = problems_of(write([make_row(truth=b"4"), make_row(truth=b"5")]), tokenizer)
    assert "rows 0, 1, column 'reward_model': found bytes in ground_truth" in message


@pytest.mark.parametrize("kind", [pa.float32(), pa.float16()])
def test_changed_by_parquet_numbers_of_few_bits_are_read_as_they_were_written(write, tokenizer, make_row, kind):
    table = pa.Table.from_pylist([make_row()])
    reward = pa.array([{"style": "rule", "ground_truth": [0.1, 2.5, None]}] , pa.struct(
        [("style", pa.string()), ("ground_truth", pa.list_(kind))]
    ))  # fmt: skip
    table = table.set_column(table.column_names.index("reward_model"), "reward_model", reward)
    assert RLHFDataset(write(table), tokenizer, DataConfig())[0].ground_truth == [0.1, 2.5, None]


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_changed_by_json_half_a_character_is_named(write, tokenizer, make_row, name):
    rows = [make_row("\U0001f600"), make_row(extra_info={"note": ["x", {"y": "a\ud83d"}]})]
    message = problems_of(write(rows, name), tokenizer)
    assert f"{name}: row 1, column 'extra_info': found half of a surrogate pair" in message and "\\ud83d" in message
    assert RLHFDataset(write(rows[:1], name), tokenizer, DataConfig())[0].messages[0]["content"] == "\U0001f600"
