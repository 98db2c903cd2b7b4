"""Copies of what is behind a URL: whole or not there, of date, made once, and secret where it must be."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest

from scalerl.config.schema import DataConfig, SFTDataConfig
from scalerl.data import DataError, RLHFDataset, SFTDataset, copy_to_local, local_copy


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_copy, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def store():
    """fsspec's store in memory, empty before and after."""
    memory = fsspec.filesystem("memory")
    memory.rm("/", recursive=True) if memory.ls("/") else None
    yield memory
    memory.rm("/", recursive=True) if memory.ls("/") else None


def error_of(src: str, cache: Path, **kwargs) -> str:
    with pytest.raises(DataError) as caught:
        copy_to_local(src, cache, **kwargs)
    return str(caught.value)


def count_reads(monkeypatch: pytest.MonkeyPatch, store) -> list[str]:
    """Names of the files that are read from a store from now on."""
    read, get_file = [], type(store).get_file
    # Of the class: each thread has an instance.
    monkeypatch.setattr(
        type(store), "get_file", lambda self, path, local: read.append(path) or get_file(self, path, local)
    )
    return read


# --- what is copied


def test_what_is_no_url_is_returned_as_it_is(tmp_path):
    for src in ("data/train.parquet", "/abs/x.json", "Qwen/Qwen3-8B", str(tmp_path), "C:x"):
        assert copy_to_local(src, tmp_path / "cache") == src
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("url", ["memory://bucket/a/train.jsonl", "memory://bucket/a/train.jsonl/"])
def test_a_file_is_copied_once(store, tmp_path, monkeypatch, url):
    store.pipe("/bucket/a/train.jsonl", b"x" * 100_000)
    read = count_reads(monkeypatch, store)
    local = Path(copy_to_local(url, tmp_path))
    assert (local.name, local.read_bytes()) == ("train.jsonl", b"x" * 100_000)
    assert copy_to_local(url, tmp_path) == str(local) and len(read) == 1
    copy_to_local(url, tmp_path, always_recopy=True)
    assert len(read) == 2


def test_a_directory_is_copied_whole_and_again_without_what_is_gone(store, tmp_path):
    store.pipe({"/d/a.txt": b"1", "/d/sub/b.txt": b"2"})
    local = Path(copy_to_local("memory://d", tmp_path))
    assert {p.relative_to(local).as_posix() for p in local.rglob("*") if p.is_file()} == {"a.txt", "sub/b.txt"}
    store.rm("/d/a.txt")
    store.pipe("/d/sub/b.txt", b"3")
    assert Path(copy_to_local("memory://d", tmp_path)) == local
    assert [p.read_bytes() for p in local.rglob("*") if p.is_file()] == [b"3"]


def test_file_urls(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    local = copy_to_local(f"file://{tmp_path}/x.json", tmp_path / "cache")
    assert local.startswith(str(tmp_path / "cache")) and Path(local).read_text() == "[]"


def test_a_member_of_an_archive(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("in/x.json", "[1]")
    local = Path(copy_to_local(f"zip://in/x.json::file://{tmp_path}/a.zip", tmp_path / "cache"))
    assert (local.name, local.read_text()) == ("x.json", "[1]")


def test_two_urls_with_one_file_name_are_two_copies(store, tmp_path):
    store.pipe({"/a/x.json": b"1", "/b/x.json": b"2"})
    one, two = copy_to_local("memory://a/x.json", tmp_path), copy_to_local("memory://b/x.json", tmp_path)
    assert (Path(one).read_bytes(), Path(two).read_bytes()) == (b"1", b"2")


def test_without_a_cache_directory_it_is_the_users_own_in_the_temporary_one(store, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store.pipe("/a/x.json", b"1")
    local = Path(copy_to_local("memory://a/x.json"))
    root = tmp_path / f"scalerl-{os.getuid()}"
    assert local.is_relative_to(root) and root.stat().st_mode & 0o777 == 0o700


def test_a_jobs_cache_is_where_all_its_nodes_see_it(store, tmp_path, monkeypatch):
    store.pipe("/x.json", b"1")
    monkeypatch.setenv("SCALERL_CACHE_DIR", str(tmp_path / "shared"))
    assert Path(copy_to_local("memory://x.json")).is_relative_to(tmp_path / "shared")
    assert Path(copy_to_local("memory://x.json", tmp_path / "own")).is_relative_to(tmp_path / "own")


def test_a_cache_of_somebody_else_is_refused(store, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"scalerl-{os.getuid()}").symlink_to(tmp_path / "theirs")
    with pytest.raises(DataError, match=r"belongs to another user; set data\.cache_dir"):
        copy_to_local("memory://a/x.json")


def test_shared_memory_takes_local_files_too(tmp_path, monkeypatch):
    monkeypatch.setattr(local_copy, "_SHM", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    (tmp_path / "x.json").write_text("[]")
    local = Path(copy_to_local(str(tmp_path / "x.json"), use_shm=True))
    assert local.is_relative_to(tmp_path / "shm") and local.read_text() == "[]"


# --- whole, and of date


def test_a_truncated_copy_is_made_again(store, tmp_path):
    store.pipe("/a/x.json", b"good")
    local = Path(copy_to_local("memory://a/x.json", tmp_path))
    for damage in (b"go", b""):
        local.write_bytes(damage)
        copy_to_local("memory://a/x.json", tmp_path)
        assert local.read_bytes() == b"good"


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"sizes": 3}', '{"sizes": {"": {}}}'])
def test_a_damaged_manifest_means_a_new_copy(store, tmp_path, monkeypatch, manifest):
    store.pipe("/a/x.json", b"good")
    local = copy_to_local("memory://a/x.json", tmp_path)
    (manifest_path,) = tmp_path.rglob("copied.json")
    manifest_path.write_text(manifest)
    read = count_reads(monkeypatch, store)
    assert copy_to_local("memory://a/x.json", tmp_path) == local and len(read) == 1
    assert json.loads(manifest_path.read_text())["sizes"] == {"": 4}


def test_a_source_that_changed_is_copied_again(store, tmp_path):
    store.pipe("/a/x.json", b"old")
    local = Path(copy_to_local("memory://a/x.json", tmp_path))
    # Of the same length: the store's time tells.
    store.pipe("/a/x.json", b"new")
    copy_to_local("memory://a/x.json", tmp_path)
    assert local.read_bytes() == b"new"


def test_a_source_that_changes_meanwhile_is_an_error_and_the_old_copy_stays(store, tmp_path, monkeypatch):
    store.pipe("/a/x.json", b"old")
    local = Path(copy_to_local("memory://a/x.json", tmp_path))
    store.pipe("/a/x.json", b"new")
    get_file = store.get_file

    def while_it_changes(path, local):
        get_file(path, local)
        store.pipe("/a/x.json", b"newer")

    monkeypatch.setattr(store, "get_file", while_it_changes)
    assert "memory://a/x.json: changed while it was copied" in error_of("memory://a/x.json", tmp_path)
    assert local.read_bytes() == b"old" and not list(tmp_path.rglob("unfinished-*"))


def test_fewer_bytes_than_announced_never_become_a_copy(store, tmp_path, monkeypatch):
    store.pipe("/a/x.json", b"12345")
    monkeypatch.setattr(local_copy, "_state", lambda fs, path: {"": {"size": 9}})
    assert "memory://a/x.json: 5 of 9 bytes arrived; start again" in error_of("memory://a/x.json", tmp_path)
    assert not list(tmp_path.rglob("x.json"))


def test_the_checksum_of_the_user(store, tmp_path, monkeypatch):
    store.pipe("/a/x.json", b"1")
    right = hashlib.sha256(b"1").hexdigest()
    assert f"its SHA-256 is {right}" in error_of(f"memory://a/x.json#sha256={'0' * 64}", tmp_path)
    assert not list(tmp_path.rglob("x.json"))
    local = copy_to_local(f"memory://a/x.json#sha256={right}", tmp_path)
    assert Path(local).read_bytes() == b"1"
    # The source is not asked any more, as long as the copy has that content.
    store.rm("/a/x.json")
    assert copy_to_local(f"memory://a/x.json#sha256={right}", tmp_path) == local
    Path(local).write_bytes(b"2")
    assert "does not exist" in error_of(f"memory://a/x.json#sha256={right}", tmp_path)
    store.pipe("/d/x.json", b"1")
    assert "is for a single file" in error_of(f"memory://d#sha256={right}", tmp_path)


def test_a_copy_whose_maker_is_killed_is_made_by_the_next(tmp_path):
    """The maker dies in the middle of the copy, with the lock: neither its lock nor its bytes stay."""
    source = tmp_path / "x.json"
    source.write_bytes(b"1" * 1000)
    url, cache = f"file://{source}", tmp_path / "cache"
    code = (
        "import os, signal, sys; from scalerl.data import copy_to_local\n"
        "os.fsync = lambda _: (print('reading', flush=True), signal.pause())\n"
        "copy_to_local(sys.argv[1], sys.argv[2])\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", code, url, str(cache)], stdout=subprocess.PIPE, text=True)
    try:
        assert maker.stdout.readline() == "reading\n"
        assert list(cache.rglob("unfinished-*")) and not list(cache.rglob("x.json"))
        waiting = subprocess.Popen(
            [sys.executable, "-c", "import sys; from scalerl.data import copy_to_local as c; print(c(*sys.argv[1:]))",
             url, str(cache)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert "another process is copying it; waiting" in waiting.stderr.readline()
    finally:
        maker.send_signal(signal.SIGKILL)
        maker.wait(timeout=60)
        maker.stdout.close()
    out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, err
    assert Path(out.strip()).read_bytes() == b"1" * 1000
    assert not list(cache.rglob("unfinished-*"))


def test_threads_make_one_copy(store, tmp_path, monkeypatch):
    store.pipe("/a/x.json", b"1" * 1000)
    read, local_paths = count_reads(monkeypatch, store), []
    threads = [
        threading.Thread(target=lambda: local_paths.append(copy_to_local("memory://a/x.json", tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(local_paths) == 4 and len(set(local_paths)) == 1 and len(read) == 1


# --- a source that fails


class Handler(http.server.SimpleHTTPRequestHandler):
    # Answers of the next requests; 200 when there is none left.
    statuses: list[int]

    def do_GET(self) -> None:
        self._answer(super().do_GET)

    def do_HEAD(self) -> None:
        self._answer(super().do_HEAD)

    def _answer(self, method) -> None:
        status = self.statuses.pop(0) if self.statuses else 200
        method() if status == 200 else self.send_error(status)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path):
    """(URL of a web server, its folder, the answers that it is to give)."""
    folder, statuses = tmp_path / "www", []
    folder.mkdir()
    handler = type("OwnHandler", (Handler,), {"statuses": statuses})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        yield f"http://127.0.0.1:{server.server_port}", folder, statuses


def test_a_web_server(web, tmp_path):
    url, folder, _ = web
    content = os.urandom(300_000)
    (folder / "x.parquet").write_bytes(content)
    local = Path(copy_to_local(f"{url}/x.parquet?token=secret", tmp_path / "cache"))
    assert (local.name, local.read_bytes()) == ("x.parquet", content)
    assert not any("secret" in path.read_text() for path in tmp_path.rglob("copied.json"))


def test_a_web_server_that_stumbles_is_asked_again(web, tmp_path, caplog):
    url, folder, statuses = web
    (folder / "x.json").write_bytes(b"1")
    # HEAD and GET of the first attempt.
    statuses += [503, 503]
    assert Path(copy_to_local(f"{url}/x.json", tmp_path / "cache")).read_bytes() == b"1"
    assert "attempt 2 of 3" in caplog.text


@pytest.mark.parametrize(
    ("status", "text"),
    [(404, "does not exist"), (403, "access denied"), (401, "access denied"), (500, "cannot be copied")],
)
def test_what_a_web_server_answers(web, tmp_path, status, text):
    url, _, statuses = web
    statuses += [status] * 6
    message = error_of(f"{url}/x.json?sig=secret", tmp_path / "cache")
    assert message.startswith(f"{url}/x.json?...: {text} (ClientResponseError: {status}") and "secret" not in message


def test_a_server_that_is_away_is_an_error_without_a_copy_and_a_warning_with_one(web, tmp_path, caplog):
    url, folder, statuses = web
    (folder / "x.json").write_bytes(b"1")
    local = copy_to_local(f"{url}/x.json", tmp_path / "cache")
    statuses += [500] * 6
    assert copy_to_local(f"{url}/x.json", tmp_path / "cache") == local
    assert "using the copy of" in caplog.text and f"{url}/x.json: cannot be copied" in caplog.text
    message = error_of("http://127.0.0.1:1/x.json", tmp_path / "cache")
    assert "http://127.0.0.1:1/x.json: cannot be copied (ClientConnectorError" in message
    assert "check the network" in message


def test_a_file_that_is_gone_is_an_error_in_spite_of_its_copy(store, tmp_path):
    store.pipe("/a/x.json", b"1")
    copy_to_local("memory://a/x.json", tmp_path)
    store.rm("/a/x.json")
    assert "memory://a/x.json: does not exist" in error_of("memory://a/x.json", tmp_path)


def test_unknown_and_missing_drivers(tmp_path):
    message = error_of("nonsense://user:secret@host/x.json", tmp_path)
    assert message.startswith("nonsense://...@host/x.json: cannot be copied (ValueError: Protocol not known")
    message = error_of("dropbox://x/y.json", tmp_path)
    assert "dropbox://x/y.json: the driver of dropbox:// is not installed (ImportError" in message


def test_a_cache_that_cannot_be_written_is_named(store, tmp_path):
    store.pipe("/a/x.json", b"1")
    (tmp_path / "file").write_text("")
    message = error_of("memory://a/x.json", tmp_path / "file")
    assert "memory://a/x.json: its copy cannot be kept" in message and str(tmp_path / "file") in message
    assert "data.cache_dir" in message


def test_a_full_disk_is_the_caches_fault(store, tmp_path, monkeypatch):
    store.pipe("/a/x.json", b"1" * 10)
    get_file = store.get_file
    monkeypatch.setattr(store, "get_file", lambda path, local: get_file(path, "/dev/full"))
    message = error_of("memory://a/x.json", tmp_path)
    assert "its copy cannot be kept in the cache" in message and "No space left" in message


# --- data sets


def test_data_sets_read_urls_and_name_them(store, tokenizer, write, make_row, tmp_path):
    good, bad = write([make_row("hi")]), write([make_row(prompt=[])], "bad.jsonl")
    chat = write([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], "c.jsonl")
    for path in (good, bad, chat):
        store.put(path, f"/bucket/{Path(path).name}")
    config = DataConfig(cache_dir=str(tmp_path / "cache"))
    data = RLHFDataset(["memory://bucket/train.parquet", good], tokenizer, config)
    assert data[0] == type(data[0])(**{**_fields(data[1]), "uid": 0})
    assert data.files == ["memory://bucket/train.parquet", good]
    assert len(SFTDataset("memory://bucket/c.jsonl", tokenizer, SFTDataConfig(cache_dir=str(tmp_path / "cache")))) == 1
    with pytest.raises(DataError, match=r"memory://bucket/bad\.jsonl: row 0, column 'prompt'"):
        RLHFDataset("memory://bucket/bad.jsonl", tokenizer, config)


def _fields(row) -> dict:
    return {name: getattr(row, name) for name in row.__slots__}


def test_urls_that_fail_are_named_together_and_before_any_copy_is_made(store, tokenizer, tmp_path, write, make_row):
    config = DataConfig(cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError) as caught:
        RLHFDataset(["memory://b/no1.json", "memory://b/no2.json"], tokenizer, config)
    assert ["no1" in caught.value.problems[0], "no2" in caught.value.problems[1]] == [True, True]
    store.pipe("/b/x.json", b"[]")
    with pytest.raises(DataError) as caught:
        RLHFDataset(["memory://b/x.json", "memory://b/x.csv", str(tmp_path / "no.json")], tokenizer, config)
    assert len(caught.value.problems) == 2 and "memory://b/x.csv must end in" in caught.value.problems[0]
    assert not list(tmp_path.rglob("x.json"))


def test_a_lock_that_is_not_given_back_is_named(store, tmp_path, monkeypatch):
    monkeypatch.setattr(local_copy, "LOCK_TIMEOUT_S", 0.1)
    store.pipe("/data.txt", b"x")
    lock = Path(copy_to_local("memory://data.txt", tmp_path)).parents[1] / ".file.lock"
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        message = error_of("memory://data.txt", tmp_path)
    assert str(lock) in message and "data.cache_dir" in message
