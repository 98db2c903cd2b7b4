"""Installs packages into this Python's environment by uv, several times as fast as pip, with pip's own configuration.

    python requirements/install.py ARGUMENTS OF PIP INSTALL...

uv does not read pip's configuration: indexes, constraints, certificates and proxies are handed to it. Where it cannot
do what pip is told to do (another setting, no uv in the index, any failure), pip does it, and its messages are what a
user reads.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata

UV = "uv==0.13.9"
# What pip calls it -> what of uv's comes nearest: the wheel for that Python, whose compiled part nothing here imports.
REPLACED = {"--ignore-requires-python": "--python-version=3.12"}
PIP = [sys.executable, "-m", "pip"]
# Settings of pip -> what uv calls them. Several values stand between spaces, for find-links between commas.
NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "constraint": "UV_CONSTRAINT",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
# Settings that change nothing of what is installed.
WITHOUT_EFFECT = frozenset(
    {
        "break-system-packages",
        "cache-dir",
        "config-file",
        "disable-pip-version-check",
        "no-cache-dir",
        "no-color",
        "no-compile",
        "no-input",
        "no-warn-script-location",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "retries",
        "root-user-action",
        "verbose",
    }
)


def main() -> int:
    arguments = sys.argv[1:]
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    settings = None if listed.returncode else uv_settings(listed.stdout)
    if settings is not None and by_uv(arguments, settings):
        return 0
    return subprocess.run([*PIP, "install", "-qq", "--no-compile", *arguments], check=False).returncode


def uv_settings(config_list: str) -> dict[str, str] | None:
    """Environment variables of uv that say what pip's configuration says; None where uv has no word for a setting.

    config_list: what `pip config list` prints, a line `section.name='value'` each; of one name the environment counts
    before a command's section, and that before the global one.
    """
    found: dict[str, tuple[int, str]] = {}
    for line in config_list.splitlines():
        key, _, literal = line.partition("=")
        section, _, name = key.rpartition(".")
        rank = {"global": 0, "install": 1, ":env:": 2}.get(section)
        if rank is not None:
            found[name] = max(found.get(name, (-1, "")), (rank, str(ast.literal_eval(literal))))
    if found.keys() - NAMES.keys() - WITHOUT_EFFECT:
        return None
    # As pip: the newest version of all indexes.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name in found.keys() & NAMES.keys():
        separator = "," if name == "find-links" else " "
        variables[NAMES[name]] = separator.join(found[name][1].split())
    return variables


def by_uv(arguments: list[str], settings: Mapping[str, str]) -> bool:
    """Whether uv is there, or could be fetched, and installed it all."""
    if uv_version() != UV.partition("==")[2]:
        fetched = subprocess.run([*PIP, "install", "-qq", "--no-deps", UV], capture_output=True, check=False)
        if fetched.returncode:
            return False
    own = [REPLACED.get(argument, argument) for argument in arguments]
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable, *own]
    environment = os.environ | {"UV_NO_CONFIG": "1"} | settings
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


def uv_version() -> str | None:
    try:
        return metadata.version("uv")
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
