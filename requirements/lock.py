"""Makes requirements/gpu.txt: `python requirements/lock.py` resolves it, `--check` says if it would change.

What is asked for is in pyproject.toml (dependencies and the extra `gpu`) and below; what cpu.txt pins is preferred, so
that a GPU machine runs the versions that the tests ran on. uv resolves, in an environment of its own: it reads the
metadata of a wheel, where pip would fetch the wheels, which are gigabytes. Nothing is installed but uv.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "gpu.txt"
UV = "uv==0.13.9"
PYTHONS = ("3.11", "3.12")
# Runs on Python 3.11, which it does not declare: what it needs there is locked for it on the last Python.
BOUND_LIFTED = "megatron-core"
PLATFORM = "x86_64-manylinux_2_34"
# Beside scalerl's own.
ASKED = {
    "torch": "torch==2.13.0",
    # What tests/gpu needs.
    "pytest": "pytest==9.2.0",
    "hypothesis": "hypothesis==6.170.15",
    # SGLang asks for a pre-release.
    "flash-attn-4": "flash-attn-4>=4.0.0b18",
    # The compiler of torch's own CUDA: device code of a newer one may not load with the driver that torch needs.
    "nvidia-cuda-nvcc": "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-crt": "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-cccl": "nvidia-cuda-cccl==13.0.*",
    "nvidia-nvvm": "nvidia-nvvm==13.0.*",
}
# Declared by SGLang, and left out.
LEFT_OUT = {
    "cuda-tile": "PyPI has a stub that fetches a wheel from NVIDIA's index when built; SGLang imports it nowhere",
}
HEADER = """\
# Everything of a GPU environment, exact versions: Linux x86-64, glibc 2.34 or newer, a driver for CUDA 13 (580.65.06 or
# newer), Python 3.11 or 3.12. Made by `python requirements/lock.py`; docs/gpu.md says how far it was tried.
#   pip install --no-deps --ignore-requires-python -r requirements/gpu.txt
#   pip install --no-deps --no-build-isolation -e .
#   scalerl doctor --gpu
"""


def asked() -> list[str]:
    """The requirements to resolve: scalerl's own with its extra `gpu`, and ASKED, which takes precedence."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    return [*(text for text in own if name_of(text) not in ASKED), *ASKED.values()]


def name_of(requirement: str) -> str:
    """The normalised name of a requirement."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def pins(text: str) -> dict[str, str]:
    """Normalised name -> version, of the lines name==version."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {name_of(line): line.partition("==")[2] for line in lines if "==" in line}


def cpu_pins() -> dict[str, str]:
    """What a CPU machine has."""
    files = ("cpu.txt", "cpu-nodeps.txt", "megatron.txt")
    return pins("\n".join((ROOT / "requirements" / name).read_text(encoding="utf-8") for name in files))


def resolve(preferred: dict[str, str]) -> dict[str, str]:
    """The versions that fit each other and what is asked for, nearest to the preferred ones, on every Python."""
    with tempfile.TemporaryDirectory(prefix="scalerl-lock-") as directory:
        folder = Path(directory)
        venv.create(folder / "uv", with_pip=True)
        subprocess.run([folder / "uv/bin/python", "-m", "pip", "install", "-qq", UV], check=True)
        # An override that never applies is how uv leaves a requirement out.
        (folder / "left_out.txt").write_text("\n".join(f'{name} ; sys_platform == "none"' for name in LEFT_OUT))
        out = folder / "locked.txt"
        answers = []
        for python in PYTHONS:
            # uv prefers what its output file has.
            best = answers[-1] if answers else preferred
            wanted = [text for text in asked() if python == PYTHONS[-1] or name_of(text) != BOUND_LIFTED]
            (folder / "asked.txt").write_text("\n".join(wanted))
            out.write_text("\n".join(f"{name}=={version}" for name, version in sorted(best.items())))
            subprocess.run(
                [
                    folder / "uv/bin/uv", "pip", "compile", folder / "asked.txt", "-o", out, "-q", "--no-annotate",
                    "--python-version", python, "--python-platform", PLATFORM, "--override", folder / "left_out.txt",
                ],
                check=True,
            )  # fmt: skip
            answers.append(pins(out.read_text()))
    first, *others = ({BOUND_LIFTED: answers[-1][BOUND_LIFTED]} | answer for answer in answers)
    for python, other in zip(PYTHONS[1:], others, strict=True):
        changed = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if changed:
            raise SystemExit(f"Python {python} resolves other versions than {PYTHONS[0]} of: {', '.join(changed)}")
    return first


def lock_text(locked: dict[str, str], cpu: dict[str, str]) -> str:
    """The file: a pin a line, with what cpu.txt has where that is another version."""
    lines = [HEADER, "# Left out of what SGLang declares:\n"]
    lines += [f"#   {name}: {reason}\n" for name, reason in LEFT_OUT.items()]
    for name, version in sorted(locked.items()):
        note = f"  # cpu.txt: {cpu[name]}" if cpu.get(name, version) != version else ""
        lines.append(f"{name}=={version}{note}\n")
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the file is not what it would be")
    check = parser.parse_args().check
    cpu = cpu_pins()
    before = LOCK.read_text(encoding="utf-8") if LOCK.exists() else ""
    # A pin of the file stays as long as it fits; of a new file, what cpu.txt has.
    text = lock_text(resolve(cpu | pins(before) if check else cpu), cpu)
    for line in text.splitlines():
        if "# cpu.txt:" in line:
            print(f"another version than on a CPU: {line}")
    if not check:
        LOCK.write_text(text, encoding="utf-8")
    elif text != before:
        print(f"{LOCK} is not what requirements/lock.py makes of pyproject.toml and cpu.txt: run it")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
