"""What the hub has not is said at once, and why."""

import pytest
from httpx import ConnectError, Request, Response
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from eaglegbv.errors import InvalidArgument
from eaglegbv.llm import LLM
from eaglegbv.loading import check_model


def _response(status: int) -> Response:
    return Response(status, request=Request("GET", "https://hub"))


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConnectError("no network"), "the hub could not be reached"),
        (OfflineModeIsEnabled("told so"), "the hub could not be reached"),
        (
            RepositoryNotFoundError("no", response=_response(404)),
            "the hub has none of this name, or not",
        ),
    ],
)
def test_a_name_the_hub_does_not_know_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    asked = []

    def refuse(_: object, name: str, **__: object) -> None:
        asked.append(name)
        raise error

    monkeypatch.setattr(HfApi, "repo_info", refuse)
    with pytest.raises(InvalidArgument, match=rf"model='nobody/none': expected .* \({why}"):
        LLM("nobody/none", "ngram")
    assert asked == ["nobody/none"]


def test_what_the_hub_minds_besides_is_left_to_the_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise HfHubHTTPError("too many", response=_response(429))

    monkeypatch.setattr(HfApi, "repo_info", refuse)
    check_model("nobody/some")
