"""Fetches repositories of a hub like Hugging Face's into the hub's cache, with errors that say what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from scalerl.errors import UserError

HUB = "https://huggingface.co"
Kind = Literal["model", "dataset"]
# Names that no organisation has, since they begin the hub's own pages.
_NO_ORGANISATIONS = ("models", "datasets", "spaces")
# Of a revision: a branch, a tag or a commit.
_REPO, _REVISION = r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*?)", r"(?P<revision>[\w./-]+?)"


class HubError(UserError):
    """Raised when a repository cannot be fetched."""


def hub_name(path: str, kind: Kind) -> tuple[str, str | None] | None:
    """Parses a name on the hub, or the page of it: (repository, revision or None); None for anything else.

    A name is ORGANISATION/NAME with @REVISION or without; hf:// may come before it, hf://datasets/ before a data set's.
    """
    folder = "datasets/" if kind == "dataset" else ""
    for hub in filter(None, (os.environ.get("HF_ENDPOINT"), HUB)):
        if path.startswith(f"{hub.rstrip('/')}/"):
            page = urlsplit(path).path.removeprefix("/")
            match = re.fullmatch(rf"{folder}{_REPO}(?:/tree/{_REVISION})?/?", page)
            break
    else:
        match = re.fullmatch(rf"(?:hf://{folder})?{_REPO}(?:@{_REVISION})?", path)
    if match is None or match["repo"].partition("/")[0] in _NO_ORGANISATIONS:
        return None
    return match["repo"], match["revision"]


def fetch_from_hub(
    repo: str,
    revision: str | None,
    kind: Kind,
    patterns: Sequence[str],
    *,
    setting: str,
    absent: str = "there is no such directory",
) -> Path:
    """Fetches the files of a repository that match a pattern, and returns the directory in the hub's cache with them.

    Processes wait for each other, an interrupted download continues, and what is whole is found without the hub
    (HF_ENDPOINT; HF_HUB_OFFLINE: it is not asked).

    repo: ORGANISATION/NAME.  revision: a branch, a tag or a commit; None: main.  setting: "key = value" or an argument
    of a command, for messages.  absent: what of that name is not on this machine.  Raises HubError.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    here = f"{setting}: {absent} in {Path.cwd()}"
    of_kind = "" if kind == "model" else f" --repo-type {kind}"
    # A directory of its first part says that it was meant for a path.
    first = repo.partition("/")[0]
    by_hand = f"correct the path ({first} is a directory here), or " if Path(first).is_dir() else ""
    by_hand += f"fetch it elsewhere (hf download {repo}{of_kind} --local-dir DIR) and give DIR"
    what = "model" if kind == "model" else "data set"
    try:
        return Path(snapshot_download(repo, revision=revision, repo_type=kind, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        page = repo if kind == "model" else f"datasets/{repo}"
        raise HubError(
            f"{setting}: its owner gives it to those who accepted its terms; accept them on "
            f"{constants.ENDPOINT}/{page}, and log in (hf auth login, or HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(f"{setting}: {repo} has no branch, tag or commit {revision}") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{here}, and {constants.ENDPOINT} has no {what} {repo}, or does not show it to this user; correct it, or "
            "log in (hf auth login, or HF_TOKEN)"
        ) from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            why = f"HF_HUB_OFFLINE is set, and it is not whole in {constants.HF_HUB_CACHE}"
        else:
            why = f"{constants.ENDPOINT} does not answer, and it is not whole in {constants.HF_HUB_CACHE}"
        raise HubError(f"{here}, and {why}; {by_hand}") from error
    except (HfHubHTTPError, OSError) as error:
        raise HubError(f"{setting}: cannot be fetched ({error}); start again to go on, or {by_hand}") from error
