"""A dataset class of the user's file: what it needs, what its rows must be, and that the rows travel without it."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl.config.schema import CustomClassConfig, DataConfig
from scalerl.data import DataError, PromptRow, PromptTable, RLHFDataset, create_rl_dataset

HEAD = "from scalerl.data import PromptRow, RLHFDataset\n"
INIT = "    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):\n        "
ROW = (
    "PromptRow(uid=9, input_ids=[5, 6], prompt_length_before=2, data_source='s', ground_truth='4', extra_info={}, "
    "messages=[{'role': 'user', 'content': 'q'}], reward_style='rule'"
)
EVERY_OTHER = f"""{HEAD}
class EveryOther(RLHFDataset):
    def __len__(self):
        return super().__len__() // 2

    def __getitem__(self, uid):
        return super().__getitem__(2 * uid)
"""


def own(code_of_row: str) -> str:
    return (
        f"{HEAD}class Mine:\n{INIT}pass\n    def __len__(self): return 3\n    def __getitem__(self, i): {code_of_row}\n"
    )


@pytest.fixture
def custom(tmp_path: Path):
    """custom(code, name): a config with the class `name` of a file with that code."""

    def make(code: str, name: str | None = "Mine", **changes) -> DataConfig:
        (tmp_path / "dataset.py").write_text(code)
        return DataConfig(custom_cls=CustomClassConfig(str(tmp_path / "dataset.py"), name), **changes)

    return make


def error_of(config: DataConfig, tokenizer, data_files="none.parquet") -> str:
    with pytest.raises(DataError) as caught:
        create_rl_dataset(data_files, tokenizer, config)
    return str(caught.value)


def test_a_class_that_draws_has_the_same_rows_in_every_process(tokenizer, custom):
    """Of data.seed: a run that goes on reads the class again. What others draw does not change by it."""
    drawn = "f'{random.random()} {np.random.rand()} {float(torch.rand(()))}'"
    code = "import random\nimport numpy as np\nimport torch\n" + own(f"return {ROW})").replace("'q'", drawn)

    def contents(seed: int) -> list[str]:
        dataset = create_rl_dataset("", tokenizer, custom(code, seed=seed))
        return [dataset[i].messages[0]["content"] for i in range(len(dataset))]

    random.seed(1)
    expected = random.random()
    random.seed(1)
    first = contents(3)
    assert random.random() == expected
    assert len(set(first)) == 3 and contents(3) == first
    assert not set(contents(4)) & set(first)


def test_the_digest_is_that_of_the_messages(tokenizer, custom):
    """Also where they hold what JSON has no form for: an address in its text must not make other rows of them."""
    plain, other, odd = (
        [create_rl_dataset("", tokenizer, custom(own(f"return {row})"))).digest for _ in range(2)]
        for row in (ROW, ROW.replace("'q'", "'other'"), ROW.replace("'q'", "[range(i), object()]"))
    )
    assert all(one == again for one, again in (plain, other, odd))
    assert len({plain[0], other[0], odd[0]}) == 3


def test_without_a_class_it_is_the_data_set_of_scalerl(write, tokenizer, make_row):
    data = create_rl_dataset(write([make_row(), make_row()]), tokenizer, DataConfig(), 1)
    assert type(data) is RLHFDataset and len(data) == 1


def test_a_class_derived_from_rlhfdataset(write, tokenizer, make_row, custom):
    path = write([make_row(truth=str(i)) for i in range(9)])
    data = create_rl_dataset(path, tokenizer, custom(EVERY_OTHER, "EveryOther"), 8)
    assert [row.ground_truth for row in data] == ["0", "2", "4", "6"]
    # The cursor counts positions: a uid is one.
    assert [row.uid for row in data] == [0, 1, 2, 3]
    whole = RLHFDataset(path, tokenizer, DataConfig())
    assert (data[1].input_ids, data[1].messages) == (whole[2].input_ids, whole[2].messages)
    with pytest.raises(IndexError, match=r"0\.\.3"):
        data[4]


def test_the_only_class_of_a_file_needs_no_name(write, tokenizer, make_row, custom):
    code = EVERY_OTHER + "\n\nclass Helper: pass\n"
    data = create_rl_dataset(write([make_row(truth=str(i)) for i in range(4)]), tokenizer, custom(code, None))
    assert [row.ground_truth for row in data] == ["0", "2"]


def test_the_rows_reach_a_process_without_the_file(write, tokenizer, make_row, custom, tmp_path):
    data = create_rl_dataset(write([make_row()] * 2), tokenizer, custom(EVERY_OTHER, "EveryOther"))
    packed = tmp_path / "packed"
    packed.write_bytes(pickle.dumps(data))
    (tmp_path / "dataset.py").unlink()
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))[0].ground_truth)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(packed)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("4\n", 0), done.stderr


def test_every_argument_arrives(tokenizer, custom):
    code = f"{HEAD}class Mine:\n{INIT}self.given = (data_files, config.seed, processor, max_samples)\n" + (
        "    def __len__(self): return 1\n"
        f"    def __getitem__(self, i): return {ROW.replace('{}', 'dict(g=str(self.given))')})\n"
    )
    data = create_rl_dataset(["a", "b"], tokenizer, custom(code, seed=5), 7)
    assert data[0].extra_info == {"g": "(['a', 'b'], 5, None, 7)"}


@pytest.mark.parametrize(
    ("code", "name", "texts"),
    [
        ("x = 1", None, ["data.custom_cls.name = null: which class of", "its classes: none; define one with __len__"]),
        (
            "class A(list): pass\nclass B(list): pass\nclass C: pass\n",
            None,
            ["which class of", "A, B could be it; set data.custom_cls.name=A"],
        ),
        ("class Mine(:\n", "Mine", ["does not import: SyntaxError", "dataset.py:1"]),
        ("import nonsense_module\n", "Mine", ["does not import: ModuleNotFoundError", "dataset.py:1: import nonsense"]),
        ("class Main: pass\n", "Mine", ["does not define the class 'Mine' (its classes: Main)", "name=Main"]),
        ("Mine = 3\n", "Mine", ["defines 'Mine' as int, not a class"]),
        ("class Mine: pass\n", "Mine", ["Mine of", "has no __len__ and no __getitem__"]),
        (
            "class Mine:\n    def __init__(self, files): 0\n    def __len__(self): 0\n    __getitem__ = __len__\n",
            "Mine",
            ["Mine(files)", "cannot be called with data_files, tokenizer, config, processor, max_samples"],
        ),
        (
            f"class Mine:\n{INIT}raise RuntimeError('boom')\n    def __len__(self): pass\n    __getitem__ = __len__\n",
            "Mine",
            ["cannot be read: RuntimeError: boom (", "dataset.py:3: raise RuntimeError('boom')"],
        ),
        (f"class Mine:\n{INIT}pass\n    def __len__(self): return 0\n    __getitem__ = __len__\n", "Mine", ["no rows"]),
        (own("return {'uid': i}"), "Mine", ["rows 0, 1, 2: __getitem__ returns dict; return a scalerl.data.PromptRow"]),
        (own("return 1 / (2 - i)"), "Mine", ["ZeroDivisionError", "dataset.py:6: def __getitem__"]),
    ],
    ids=range(12),
)  # fmt: skip
def test_a_class_that_cannot_be_used(tokenizer, custom, code, name, texts):
    message = error_of(custom(code, name), tokenizer)
    for text in texts:
        assert text in message


def test_paths_that_cannot_be_used(tokenizer, tmp_path):
    def config(path) -> DataConfig:
        return DataConfig(custom_cls=CustomClassConfig(path, "Mine"))

    assert "data.custom_cls.path = null" in error_of(config(None), tokenizer)
    assert "no.py does not exist" in error_of(config(str(tmp_path / "no.py")), tokenizer)
    (tmp_path / "x.txt").write_text("")
    assert "is no Python file" in error_of(config(str(tmp_path / "x.txt")), tokenizer)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("input_ids=[]", "input_ids is empty"),
        ("input_ids=(1, 2)", "input_ids is tuple, give a list of integers"),
        ("input_ids=[1.5]", "input_ids is list with other values"),
        ("input_ids=[-1]", "input_ids holds -1, which is no token"),
        ("input_ids=[10**6]", "input_ids holds 1000000, which is no token of the tokenizer (0..258)"),
        ("input_ids=[1] * 99", "more tokens than data.max_prompt_length=64"),
        ("data_source=''", "data_source is empty"),
        ("data_source=None", "data_source is null, give the name"),
        ("messages='hi'", "messages is str"),
        ("extra_info=None", "extra_info is null, give a dict"),
        ("images=['a.png']", "images: the model has no vision part"),
        ("ground_truth=[float('nan')]", "ground_truth has nan, which is no answer"),
        ("ground_truth=b'4'", "ground_truth has bytes, which is no answer"),
        ("data_source='a\\ud800'", "half of a surrogate pair"),
        ("ground_truth=lambda: 4", "values cannot be sent to other processes"),
        ("ground_truth=Truth()", "values hold objects of classes of this file"),
    ],
)
def test_a_row_that_is_none(tokenizer, custom, change, text):
    row = f"__import__('dataclasses').replace({ROW}), **({{}} if i == 1 else dict({change})))"
    code = own(f"return {row}") + "class Truth: pass\n"
    message = error_of(custom(code, max_prompt_length=64), tokenizer)
    assert "Mine of " in message and "dataset.py: rows 0, 2: " in message and text in message


def test_rows_of_the_right_kind_are_taken_as_they_are(tokenizer):
    row = PromptRow(7, [3, 1], 5, "s", {"tests": [1]}, {"a": 1}, [{"role": "user", "content": "q"}], "model")
    table = PromptTable([row], "rows", tokenizer, DataConfig())
    assert table[0] == PromptRow(0, [3, 1], 5, "s", {"tests": [1]}, {"a": 1}, row.messages, "model")
