"""`scalerl generate` before any server: what is checked, what a run finds of an earlier one, what it leaves behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.base.directory_lock import DirectoryInUseError
from scalerl.commands import main_generation
from scalerl.commands.main_generation import check_generation
from scalerl.commands.parts import GenerationError, Parts, fingerprint, is_complete
from scalerl.config import ConfigError, GenerationConfig, compose
from tests.tiny_models import make_tiny_model

ROWS = [{"prompt": [{"role": "user", "content": text}], "id": number} for number, text in enumerate(["a", "bb", "ccc"])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory, "qwen3")
    return directory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(model)
    write(ROWS)
    return tmp_path


def write(rows: list[dict[str, Any]], name: str = "in.parquet") -> None:
    pq.write_table(pa.Table.from_pylist(rows), name)


def arguments(*overrides: str) -> list[str]:
    return [
        "+recipe=generate_cpu",
        "data.path=in.parquet",
        "data.output_path=out.parquet",
        "data.batch_size=2",
        "model.path=model",
        "rollout.name=embedded",
        "rollout.prompt_length=64",
        "rollout.response_length=8",
        *overrides,
    ]


def config(*overrides: str) -> GenerationConfig:
    return compose("generation", arguments(*overrides))


def parts_of(cfg: GenerationConfig) -> Parts:
    inputs = check_generation(cfg)
    return Parts(Path(cfg.data.output_path), inputs.fingerprint, len(inputs.prompts), cfg.data.batch_size)


def responses(*texts: str) -> dict[str, pa.Array]:
    return {"responses": pa.array([[text] for text in texts])}


def test_prompts_are_those_of_the_rows_through_the_chat_template(here):
    inputs = check_generation(config("data.max_samples=2"))
    assert [inputs.tokenizer.decode(prompt.input_ids) for prompt in inputs.prompts] == [
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("a", "bb")
    ]
    assert [prompt.row for prompt in inputs.prompts] == [0, 1]
    assert {prompt.sampling.max_new_tokens for prompt in inputs.prompts} == {8}


def test_a_model_whose_heads_do_not_fit_the_ranks_of_a_server(here):
    sizes = ["rollout.name=sglang", "rollout.tensor_model_parallel_size=8", "trainer.n_gpus_per_node=8"]
    assert check_generation(config(*sizes[:1], "rollout.tensor_model_parallel_size=4", sizes[2]))
    with pytest.raises(ConfigError) as caught:
        check_generation(config(*sizes))
    (heads,) = caught.value.violations
    assert heads.startswith("rollout.tensor_model_parallel_size = 8: must divide the model's 4 attention heads")


def test_end_of_text_of_a_model_directory_is_a_token_of_its_own(here, model, caplog):
    """An ordinary token that ends responses is refused; a template that writes none of them is said."""
    Path("model").unlink()
    shutil.copytree(model, "model")
    Path("own.jinja").write_text("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}")
    assert check_generation(config("data.chat_template_path=own.jinja", "+data.chat_template_kwargs.thinkin=false"))
    assert "writes '<|endoftext|>' after an answer" in caplog.text and "names no variable thinkin " in caplog.text
    file = Path("model/generation_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, 40]}))
    with pytest.raises(ConfigError, match="token 40 ends a response"):
        check_generation(config())


def test_rows_count_over_files_and_may_ask_for_their_own_sampling(here):
    write([ROWS[0] | {"extra_info": {"sampling": {"temperature": 0.5, "max_new_tokens": None}}}], "own.parquet")
    first, *_, last = check_generation(config("data.path=[in.parquet,own.parquet]")).prompts
    assert (first.sampling.temperature, last.sampling.temperature, last.row) == (1.0, 0.5, 3)


def test_long_prompts_are_cut_or_refused(here):
    short = "rollout.prompt_length=20"
    with pytest.raises(ConfigError, match=r"rows 1, 2, column 'prompt': found a prompt longer than rollout.prompt_l"):
        check_generation(config(short))
    whole, cut = (check_generation(config(*more)).prompts for more in ([], [short, "data.truncation=left"]))
    assert [prompt.input_ids for prompt in cut] == [prompt.input_ids[-20:] for prompt in whole]
    assert len(whole[2].input_ids) > 20


def test_all_that_is_wrong_comes_together(here):
    write([ROWS[0] | {"responses": ["x"]}, ROWS[0] | {"prompt": [], "extra_info": None}], "bad.parquet")
    with pytest.raises(ConfigError) as caught:
        check_generation(
            config("data.path=bad.parquet", "data.output_path=bad.parquet", "rollout.response_length=4000000")
        )
    positions, output, column, prompt = caught.value.violations
    assert "rollout.prompt_length + rollout.response_length = 4000064 tokens exceed" in positions
    assert "data.output_path = bad.parquet: is the input" in output
    assert "has a column 'responses' already" in column and "data.response_key" in column
    assert "row 1, column 'prompt': found an empty list" in prompt


def jsonl(rows: list[dict[str, Any]]) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ([{}, 2**64, 1], 1),
        ([1, 2, {"a": 2**70}], 2),
        ([1, "x", 3], 1),
        ([[1], [2], ["x"]], 2),
        (["a", "\ud800", "b"], 1),
    ],
)
def test_cannot_be_written_is_found_before_the_servers_start(here, values, row):
    jsonl([prompt | {"more": value} for prompt, value in zip(ROWS, values, strict=True)])
    with pytest.raises(ConfigError, match=rf"in\.jsonl: row {row}, column 'more': found "):
        check_generation(config("data.path=in.jsonl"))


@pytest.mark.parametrize("value", [{}, {"a": [{}, None]}, {"a": {}, "b": 1}])
def test_cannot_be_written_dicts_without_keys_become_null(here, value):
    jsonl([row | {"extra_info": value} for row in ROWS])
    cfg = config("data.path=in.jsonl")
    inputs = check_generation(cfg)
    with parts_of(cfg) as parts:
        for batch in parts.missing():
            parts.write(batch, responses(*"x" * len(parts.rows(batch))))
        parts.finish(inputs.table)
    written = pq.read_table("out.parquet").to_pylist()
    assert [row["responses"] for row in written] == [["x"]] * 3
    assert json.dumps(written[0]["extra_info"]) == json.dumps(value).replace("{}", "null")


def test_an_extra_info_that_is_no_dict_is_named(here):
    jsonl([ROWS[0], ROWS[1] | {"extra_info": [1]}])
    with pytest.raises(ConfigError, match=r"in\.jsonl: row 1, column 'extra_info': found list, not a dict"):
        check_generation(config("data.path=in.jsonl"))


def test_a_sampling_that_a_row_cannot_have_names_the_keys_of_this_program(here):
    write([ROWS[0] | {"extra_info": {"sampling": {"max_new_tokens": 9}}}])
    with pytest.raises(ConfigError, match=r"more than rollout\.response_length=8; lower it"):
        check_generation(config())


def test_parts_become_the_output_and_are_gone(here):
    cfg = config()
    with parts_of(cfg) as parts:
        assert parts.missing() == [0, 1]
        parts.write(1, responses("c"))
        assert parts.missing() == [0]
    # A later run finds them.
    with parts_of(cfg) as parts:
        assert parts.missing() == [0]
        parts.write(0, responses("a", "b"))
        assert parts.missing() == [] and not Path("out.parquet").exists()
        parts.finish(pq.read_table("in.parquet"))
    assert pq.read_table("out.parquet").to_pylist() == [
        row | {"responses": [text]} for row, text in zip(ROWS, "abc", strict=True)
    ]
    assert sorted(path.name for path in here.iterdir()) == ["in.parquet", "model", "out.parquet"]


def finish(cfg: GenerationConfig) -> None:
    with parts_of(cfg) as parts:
        for batch in parts.missing():
            parts.write(batch, responses(*"x" * len(parts.rows(batch))))
        parts.finish(pq.read_table("in.parquet"))


def test_an_output_that_is_there_needs_no_run(here, capsys):
    finish(config())
    before = Path("out.parquet").read_bytes()
    # Killed before it could remove them.
    Path("out.parquet.parts").mkdir()
    assert main_generation.main(arguments("trainer.n_gpus_per_node=4", "rollout.num_replicas=4")) == 0
    assert "out.parquet is there already, made with these settings" in capsys.readouterr().out
    assert Path("out.parquet").read_bytes() == before and not Path("out.parquet.parts").exists()


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("rollout.temperature=0.5", "rollout.temperature 1.0 there, 0.5 here"),
        ("data.n_samples=2", "data.n_samples 1 there, 2 here"),
        ("rollout.seed=1", "rollout.seed 42 there, 1 here"),
    ],
)
def test_other_settings_are_refused_for_an_output_and_for_parts(here, override, difference):
    with parts_of(config()):
        pass
    with pytest.raises(GenerationError, match=f"out.parquet.parts has responses of other settings: {difference};"):
        parts_of(config(override))
    finish(config())
    with pytest.raises(GenerationError, match=f"out.parquet: exists, of other settings: {difference};"):
        main_generation.main(arguments(override))


def test_what_is_read_counts_not_where_it_lies(here, model):
    wanted = check_generation(config()).fingerprint
    write(ROWS, "same.parquet")
    assert check_generation(config("data.path=same.parquet", f"model.path={model}")).fingerprint == wanted
    write([*ROWS[:2], ROWS[2] | {"id": 7}])
    different = check_generation(config()).fingerprint
    assert {key for key in wanted if wanted[key] != different[key]} == {"rows of data.path"}


@pytest.mark.parametrize("place", [0, 2**20 + 5, -1])
def test_another_model_is_noticed_by_its_weights(here, place):
    """Every byte of a large file counts, and its size."""
    Path("weights").mkdir()
    content = bytearray(5 * 2**20)
    cfg = config()
    cfg.model.path = "weights"

    def digest() -> str:
        Path("weights/model.safetensors").write_bytes(content)
        return fingerprint(cfg, [])["files of model.path"]

    before = digest()
    content[place] ^= 1
    assert digest() != before
    content[place] ^= 1
    assert digest() == before
    del content[-1]
    assert digest() != before


def test_a_file_that_is_no_output_is_not_replaced(here):
    Path("out.parquet").write_text("mine")
    with pytest.raises(GenerationError, match=r"out.parquet: exists, and is no output of scalerl generate"):
        main_generation.main(arguments())
    assert Path("out.parquet").read_text() == "mine"
    assert not is_complete(Path("other.parquet"), {})


def test_two_runs_do_not_write_one_output(here):
    with parts_of(config()), pytest.raises(DirectoryInUseError, match=r"data.output_path = out\.parquet: another run"):
        parts_of(config())
    with parts_of(config()):
        pass


def test_dry_run_leaves_nothing(here, capsys):
    assert main_generation.main(arguments("--dry-run")) == 0
    assert "starts nothing" in capsys.readouterr().out
    assert sorted(path.name for path in here.iterdir()) == ["in.parquet", "model"]
