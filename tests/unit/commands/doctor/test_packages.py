from __future__ import annotations

from pathlib import Path

import pytest

from scalerl.commands.doctor import packages
from scalerl.commands.doctor.packages import Package, check_installed


def install(site: Path, name: str, version: str, *, module: bool) -> Package:
    """Metadata of a distribution, with its module or without."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if module:
        (site / f"{name}.py").write_text("raise RuntimeError('it was imported')\n")
    return Package(name, name, name, "no test")


def test_metadata_is_read_and_nothing_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    finding = check_installed(install(tmp_path, "probed_whole", "1.0", module=True))
    assert finding.ok and finding.value.split() == ["1.0", "installed"]


def test_metadata_without_its_module_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    finding = check_installed(install(tmp_path, "probed_empty", "1.0", module=False))
    assert finding.ends_a_run and "the module probed_empty is not" in finding.value


def test_version_that_scalerl_does_not_take_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = install(tmp_path, "probed_old", "0.9", module=True)
    declared = {"probed-old": packages.Requirement("probed-old>=1")}
    monkeypatch.setattr(packages, "declared_requirements", lambda: declared)
    finding = check_installed(package)
    assert finding.ends_a_run and "scalerl needs probed-old>=1" in finding.value
