"""Queries to the Hugging Face hub for a repository, with reasons for a failure."""

import re
from pathlib import Path

from httpx import HTTPError, RequestError
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from eaglegbv.errors import InvalidArgument

_MODEL_NAME = re.compile(r"([\w.-]+/)?[\w.-]+")
"""Pattern of a model's name; some old models of the hub have no owner."""

_TIMEOUT = 10.0
"""Seconds within which the hub must answer."""


def check_model(model: str | Path, argument: str = "model") -> None:
    """Check, before anything is loaded, that a model is a folder or a repository of the hub.

    The hub is asked once. transformers would ask again for half a minute, and not report that it
    was the network that failed.

    Args:
        model: Folder or hub name. A path that is not a folder passes: the error is reported when it
            is opened.
        argument: Name of the argument in an error.

    Raises:
        InvalidArgument: The hub has no such model, or does not answer.
    """
    name = str(model)
    if Path(model).is_dir() or not _MODEL_NAME.fullmatch(name):
        return
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            ask_hub(name)
    except (OSError, HTTPError, ValueError) as error:  # ValueError: an impossible name of a model
        expected = "an existing model folder, or a model id of the Hugging Face hub"
        raise InvalidArgument(argument, name, f"{expected} ({hub_refusal(error)})") from error


def ask_hub(repository: str, kind: str = "model") -> None:
    """Ask the hub, once, whether it has a repository.

    Args:
        repository: Name of the repository.
        kind: ``"model"`` or ``"dataset"``.

    Raises:
        OSError: The hub has no such repository, or does not answer; see :func:`hub_refusal`.
        httpx.HTTPError: The hub cannot be reached.
    """
    try:
        HfApi().repo_info(repository, repo_type=kind, timeout=_TIMEOUT)
    except RepositoryNotFoundError:
        raise
    except HfHubHTTPError:  # the hub answers; if there still is an error, the download reports it
        return


def hub_refusal(error: Exception) -> str:
    """Return why the hub gave nothing, given the error that its client raised."""
    if isinstance(error, RepositoryNotFoundError | ValueError):
        return "the hub has none of this name, or not for you"
    if isinstance(error, RequestError | ConnectionError | LocalEntryNotFoundError):
        return "the hub could not be reached"
    return f"the hub did not give it: {type(error).__name__}"
