"""The logs of an attempt as one."""

from __future__ import annotations

from pathlib import Path

from scalerl.extras.slurm.logs import ends_of, followed


def test_ends_of_all_logs_under_their_names(tmp_path: Path) -> None:
    for name, text in {"node-n1": "a\nb\n", "driver": "1\n2\n3\n", "judge/judge-0": "j\n", "ray/n1/x": "no\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.log").write_text(text)
    assert list(ends_of(tmp_path, 2)) == [
        "driver        | 2", "driver        | 3", "judge/judge-0 | j", "node-n1       | a", "node-n1       | b",
    ]  # fmt: skip


def test_what_is_added_is_followed_by_whole_lines(tmp_path: Path) -> None:
    driver = tmp_path / "driver.log"
    driver.write_text("old\nhal")
    lines = followed(tmp_path, poll_s=0.0)
    driver.write_text("old\nhalf\n")
    (tmp_path / "node-n1.log").write_text("new\nnot whole")
    assert next(lines) == "driver  | f"
    assert next(lines) == "node-n1 | new"
    with driver.open("a") as file:
        file.write("more\n")
    assert next(lines) == "driver  | more"


def test_the_attempt_after_a_requeue_is_followed_from_its_first_line(tmp_path: Path) -> None:
    """Its logs have the names of those before, and are shorter."""
    first, second, latest = tmp_path / "attempt_0", tmp_path / "attempt_1", tmp_path / "latest"
    first.mkdir()
    (first / "driver.log").write_text("a long line of the first attempt\n")
    latest.symlink_to("attempt_0")
    lines = followed(latest, poll_s=0.0)
    with (first / "driver.log").open("a") as file:
        file.write("its last\n")
    second.mkdir()
    (second / "driver.log").write_text("begun\n")
    latest.unlink()
    latest.symlink_to("attempt_1")
    assert [next(lines) for _ in range(3)] == ["driver | its last", "----- attempt_1", "driver | begun"]
