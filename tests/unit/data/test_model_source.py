"""model.path: a directory, a name on a hub, or a URL. The hub is a server here that speaks what its client asks for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scalerl.config.schema import PPOConfig, SFTConfig
from scalerl.data.hub import hub_name
from scalerl.data.model_source import ModelSourceError, fetch_models, model_directory, model_keys
from tests.hub_mirror import COMMIT, Hub

REPO = "makers/model"
# More than the piece of 10 MiB by which the client writes.
WEIGHTS = bytes(range(256)) * (12 << 12)


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS, "pytorch_model.bin": b"the same again"}
    with Hub(REPO, files).serving() as mirror:
        yield mirror


def fetch(hub: Hub, home: Path, *paths: str, offline: bool = False) -> list[str]:
    """What `model_directory` says of each path, in a process that may ask the hub."""
    env = hub.environment(home, offline)
    code = (
        "import sys\n"
        "from scalerl.data.model_source import model_directory\n"
        "for path in sys.argv[1:]:\n"
        "    try: print(model_directory(path, 'model.path'))\n"
        "    except ValueError as error: print(f'{type(error).__name__}: {error}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_model_comes_from_the_hub_once_and_is_found_offline(hub: Hub, tmp_path: Path) -> None:
    page = f"{hub.url}/{REPO}/tree/v1"
    by_name, by_revision, by_page, unknown, no_revision = fetch(
        hub, tmp_path, REPO, f"hf://{REPO}@{COMMIT}", page, "makers/other", f"{REPO}@v2"
    )
    assert Path(by_name).name == COMMIT and by_name == by_revision == by_page
    assert {path.name for path in Path(by_name).iterdir()} == {"config.json", "model.safetensors"}
    assert (Path(by_name) / "model.safetensors").read_bytes() == WEIGHTS
    assert sum(method == "GET" and path.endswith("model.safetensors") for method, path, _ in hub.requests) == 1
    assert (
        unknown.startswith("ModelSourceError: model.path = makers/other: ") and "has no model makers/other" in unknown
    )
    assert "has no branch, tag or commit v2" in no_revision
    number = len(hub.requests)
    offline, missing = fetch(hub, tmp_path, REPO, "makers/other", offline=True)
    assert offline == by_name and len(hub.requests) == number
    assert "HF_HUB_OFFLINE is set, and it is not whole in" in missing and "hf download makers/other" in missing


def test_two_processes_that_fetch_the_same_model_at_once(hub: Hub, tmp_path: Path) -> None:
    """As the jobs of a sweep do: one transfers the weights while the other, which has asked for them, waits."""
    hub.awaited = 2
    with ThreadPoolExecutor(2) as pool:
        fetched = list(pool.map(lambda _: fetch(hub, tmp_path, REPO), range(2)))
    assert fetched[0] == fetched[1]
    (directory,) = fetched[0]
    assert (Path(directory) / "model.safetensors").read_bytes() == WEIGHTS
    assert sum(method == "GET" and path.endswith("model.safetensors") for method, path, _ in hub.requests) == 1


def test_cut_transfer_goes_on_and_other_bytes_are_refused(hub: Hub, tmp_path: Path) -> None:
    hub.cut = 11 << 20
    (directory,) = fetch(hub, tmp_path / "cut", REPO)
    assert (Path(directory) / "model.safetensors").read_bytes() == WEIGHTS
    spans = [span for method, path, span in hub.requests if method == "GET" and path.endswith("model.safetensors")]
    assert len(spans) == 2 and spans[1] == f"bytes={10 << 20}-"
    hub.says_sha256 = "0" * 64
    (text,) = fetch(hub, tmp_path / "other", REPO)
    assert "model.safetensors has the SHA-256" in text and f"the hub says {'0' * 64}" in text


def test_hub_that_does_not_answer_says_so(tmp_path: Path) -> None:
    (text,) = fetch(Hub(REPO, {}, url="http://127.0.0.1:9"), tmp_path, REPO)
    assert text.startswith("ModelSourceError") and "127.0.0.1:9" in text and "--local-dir" in text


def test_path_that_was_meant_for_a_directory_is_to_be_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mine` is a directory here; the hub is not asked in tests."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "right").mkdir(parents=True)
    with pytest.raises(ModelSourceError, match=r"correct the path \(mine is a directory here\)"):
        model_directory("mine/wrong", "model.path")


def test_names_of_the_hub_are_told_from_paths() -> None:
    assert hub_name("Qwen/Qwen3-0.6B", "model") == ("Qwen/Qwen3-0.6B", None)
    assert hub_name("hf://Qwen/Qwen3-0.6B@v1.0", "model") == ("Qwen/Qwen3-0.6B", "v1.0")
    assert hub_name("https://huggingface.co/Qwen/Qwen3-8B/tree/main", "model") == ("Qwen/Qwen3-8B", "main")
    for path in (
        "/models/Qwen3",
        "model",
        "models/Qwen3-8B",
        "./org/name",
        "a/b/c",
        "s3://bucket/model",
        "https://example.org/Qwen/Qwen3",
    ):
        assert hub_name(path, "model") is None


def test_directory_stays_and_one_at_a_url_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert model_directory("~/model", "model.path") == str(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    assert model_directory(str(tmp_path / "model"), "model.path") == str(tmp_path / "model")
    copied = Path(model_directory(f"file://{tmp_path / 'model'}", "model.path"))
    assert copied != tmp_path / "model" and (copied / "config.json").read_text() == "{}"
    with pytest.raises(ModelSourceError, match=r"model.path = /no/such: there is no such directory"):
        model_directory("/no/such", "model.path")


def test_every_model_of_a_configuration_is_fetched(tmp_path: Path) -> None:
    cfg = PPOConfig()
    cfg.actor_rollout_ref.model.path = cfg.reward_model.judge.model.path = f"file://{tmp_path}"
    (tmp_path / "config.json").write_text("{}")
    cfg.reward_model.model.path, cfg.critic.model.path = "/no/such", None
    failed: list[str] = []

    def attempt(fetch_one):
        try:
            return fetch_one()
        except ValueError as error:
            failed.append(str(error))

    fetch_models(cfg, attempt)
    assert cfg.actor_rollout_ref.model.path == cfg.reward_model.judge.model.path
    assert (Path(cfg.actor_rollout_ref.model.path) / "config.json").exists()
    assert len(failed) == 1 and failed[0].startswith("reward_model.model.path = /no/such")
    assert [key for _, _, key in model_keys(SFTConfig())] == ["model.path"]
