"""Upload of a merged model to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path


class UploadError(OSError):
    """The model was merged, but not uploaded."""


def check_repo_name(repo_id: str) -> None:
    """Raises ValueError for a name that no repository can have."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"--hf_upload_path {repo_id!r} is no name of a repository: {error}") from None


def upload(directory: Path, repo_id: str, *, private: bool) -> str:
    """Uploads the whole directory to a repository, which is made if it does not exist; returns its address.

    Raises UploadError, with the command that repeats the upload, if the hub refuses it or does not answer.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(folder_path=str(directory), repo_id=repo_id, commit_message="Upload model merged by scalerl")
    # The answers of the hub are HTTPErrors too, like a refused connection and one that takes too long.
    except (HTTPError, OSError) as error:
        raise UploadError(
            f"{directory} was merged but could not be uploaded to {repo_id}: {error}. Log in (hf auth login), or set "
            "HF_TOKEN, then: hf upload " + f"{repo_id} {directory}"
        ) from None
    return f"{api.endpoint}/{repo_id}"
