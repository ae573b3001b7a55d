"""The door to the API server: JSON in, JSON out, on the official client, for threads.

Plain paths, a time limit for every request, and one error that says what the server said. Nothing is tried again here:
watchers and the writer know better when. The client takes a service account's token anew from its file when it changes.
Any thread; each request has a connection of its own while it lasts.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import urllib3
from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config

from pykvcache_contract.errors import ConfigurationError, TransientError
from pykvcache_contract.names import AGENT_FIELD_MANAGER

Document = dict[str, Any]

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 20.0
SILENCE_SECONDS = 100.0
"""A watch in which nothing happens brings a bookmark every minute; one without is dead."""
WATCH_SECONDS = 300
"""How long the server keeps a watch open; it then goes on from where it was."""
PAGE_OBJECTS = 500
_GONE = 410
_MISSING = 404
_CONNECTIONS_MAX = 8


class ApiError(TransientError):
    """The API server refused (`status` is its HTTP status), or did not answer (0)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_missing(self) -> bool:
        """Return whether there is no such object."""
        return self.status == _MISSING

    @property
    def is_expired(self) -> bool:
        """Return whether a watch must begin with a new list."""
        return self.status == _GONE


def load_configuration() -> Any:
    """Return the client's configuration: the pod's service account, else $KUBECONFIG or ~/.kube/config.

    Raises:
        ConfigurationError: there is neither.
    """
    configuration = kubernetes_client.Configuration()
    try:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
    except kubernetes_config.ConfigException:
        try:
            kubernetes_config.load_kube_config(client_configuration=configuration)
        except (kubernetes_config.ConfigException, OSError) as error:
            raise ConfigurationError(
                f"no way to the API server: not in a pod with a service account, and no kubeconfig ({error}). Set "
                "KUBECONFIG to a file that kubectl can use."
            ) from error
    configuration.retries = False
    configuration.connection_pool_maxsize = _CONNECTIONS_MAX
    return configuration


class Api:
    """Requests to one API server.

    Args:
        configuration: from `load_configuration`.
    """

    def __init__(self, configuration: Any) -> None:
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # we say ourselves what failed, once
        self._client = kubernetes_client.ApiClient(configuration)
        self._client.user_agent = AGENT_FIELD_MANAGER

    def get(self, path: str) -> Document:
        """Return an object.

        Raises:
            ApiError: refused, missing or no answer.
        """
        return self._document("GET", path)

    def list(self, path: str, query: Mapping[str, str] | None = None) -> "tuple[list[Document], str]":
        """Return all objects, and the version of the list to watch from; fetched in pages.

        Raises:
            ApiError: refused or no answer.
        """
        items: list[Document] = []
        page = {**(query or {}), "limit": str(PAGE_OBJECTS)}
        while True:
            answer = self._document("GET", path, query=page)
            items += answer["items"]
            token = answer["metadata"].get("continue")
            if not token:
                return items, str(answer["metadata"]["resourceVersion"])
            page["continue"] = token

    def watch(
        self, path: str, *, version: str, query: Mapping[str, str] | None = None
    ) -> Iterator[tuple[str, Document]]:
        """Yield kind and object of every event, bookmarks too, until the server ends the watch.

        Raises:
            ApiError: refused, expired, or silent for `SILENCE_SECONDS`.
        """
        parameters = {
            **(query or {}),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        response = self._request("GET", path, query=parameters, seconds=SILENCE_SECONDS)
        try:
            for line in _lines(response):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _refusal(path, event["object"].get("code", 0), event["object"].get("message", ""))
                yield event["type"], event["object"]
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise ApiError(f"watch {path}: {error}") from error
        finally:
            response.close()

    def apply(self, path: str, body: Document) -> Document:
        """Apply the fields of `body` server-side as the agent's; fields applied before and left out now go.

        Raises:
            ApiError: refused or no answer.
        """
        query = {"fieldManager": AGENT_FIELD_MANAGER, "force": "true"}
        return self._document("PATCH", path, query=query, body=body)

    def _document(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Document | None = None
    ) -> Document:
        response = self._request(method, path, query=query, body=body, seconds=REQUEST_SECONDS)
        try:
            document: Document = json.loads(response.read())
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise ApiError(f"{method} {path}: {error}") from error
        finally:
            response.close()
        return document

    def _request(
        self,
        method: str,
        path: str,
        *,
        seconds: float,
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
    ) -> Any:
        """Send one request; return the open response of a success, which the caller closes."""
        content = "application/json" if body is None else "application/apply-patch+yaml"
        request = self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._client.call_api(*request, _request_timeout=(CONNECT_SECONDS, seconds)).response
            if response.status < 400:
                return response
            text = response.read(4096).decode(errors="replace")
            response.close()
        except (urllib3.exceptions.HTTPError, kubernetes_client.ApiException, OSError) as error:
            raise ApiError(f"{method} {path}: {error}") from error
        raise _refusal(path, response.status, _message_of(text))


def _lines(response: Any) -> Iterator[bytes]:
    rest = b""
    for chunk in response.stream(amt=None):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(None, lines)


def _message_of(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text


def _refusal(path: str, status: int, message: str) -> ApiError:
    return ApiError(f"{path}: {status} {message[:1000]}", status=status)
