"""What was trained, copied to the hub."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pushed:
    """What became of a copy for the hub.

    Attributes:
        repository: "user/name".
        url: of the commit; "" where there is none.
        cause: why it failed; "" where it did not.
    """

    repository: str
    url: str = ""
    cause: str = ""

    @property
    def is_there(self) -> bool:
        return not self.cause

    def to_dict(self) -> dict[str, str]:
        """As plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        if self.is_there:
            return f"pushed to {self.url}"
        return (
            f"{self.repository}: it could not be pushed ({self.cause}); what was saved is whole, and the same "
            "command tries again"
        )


def require_pushable(repository: str) -> None:
    """Refuse, before a training, what cannot be pushed to after it. Looks at nothing but the name and the token.

    Raises:
        ConfigError: it is no name of a repository, or there is no token, or the hub is not to be asked.
    """
    told = f"output.push_to_hub={repository!r}"
    try:
        validate_repo_id(repository)
    except ValueError as error:
        raise ConfigError(f"{told}: {str(error).strip()}") from error
    if "/" not in repository:
        raise ConfigError(f"{told}: say whose it is, as in user/{repository}")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{told}: HF_HUB_OFFLINE is set, so nothing can be pushed; unset it, or push later")
    if huggingface_hub.get_token() is None:
        raise ConfigError(f"{told}: there is no token of the hub here; hf auth login, or set HF_TOKEN")


def push(directory: Path, repository: str, *, private: bool) -> Pushed:
    """Copy a folder to a repository of the hub, which is made if it is not there. Raises nothing of the hub's."""
    api = huggingface_hub.HfApi()
    try:
        made = api.create_repo(repository, private=private or None, exist_ok=True)
        commit = api.upload_folder(
            repo_id=made.repo_id, folder_path=directory, commit_message="Trained by shardwise"
        )
    except Exception as error:  # of the network, of the hub, of a token: there is a model on the disk either way
        return Pushed(repository, cause=f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0])
    return Pushed(repository, url=str(commit.commit_url))
