"""The door to the API server: JSON in, JSON out, on the asyncio half of the official client.

Paths are plain (`/api/v1/nodes/a`), so nothing has to be discovered first. Every request is counted, has a time limit,
and ends in a dict or in an `ApiError` that says what the server said. It retries nothing: informers and the workers
know better when. Used on the event loop's thread only.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from pykvcache_contract.errors import ConfigurationError, TransientError

logger = logging.getLogger(__name__)

FIELD_MANAGER = "pykvcache-operator"
REQUEST_SECONDS = 30.0
CONNECT_SECONDS = 10.0
PAGE_OBJECTS = 500
"""Objects per page of a list, as kubectl asks for."""
MERGE_PATCH = "application/merge-patch+json"
STEPS_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
Document = dict[str, Any]
Documents = list[Document]  # inside Api `list` is a method
Body = Document | Documents


class ApiError(TransientError):
    """The API server refused or did not answer (`status` 0); `reason` is the server's word for it."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

    @property
    def is_missing(self) -> bool:
        return self.status == 404

    @property
    def is_forbidden(self) -> bool:
        return self.status == 403

    @property
    def is_conflict(self) -> bool:
        """Something else changed the object, or it exists already: look again."""
        return self.status == 409

    @property
    def is_expired(self) -> bool:
        """The resource version of a watch or list is no longer known: list again."""
        return self.status == 410


async def load_configuration() -> Any:
    """Return the official client's configuration: the pod's service account, else $KUBECONFIG or ~/.kube/config.

    Raises:
        ConfigurationError: there is neither.
    """
    configuration = kubernetes_client.Configuration()
    try:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
    except kubernetes_config.ConfigException:
        try:
            await kubernetes_config.load_kube_config(client_configuration=configuration)
        except (kubernetes_config.ConfigException, OSError) as error:
            raise ConfigurationError(
                f"no way to the API server: not in a pod with a service account, and no kubeconfig ({error}). "
                "Set KUBECONFIG to a file that kubectl can use."
            ) from error
    return configuration


class Api:
    """Requests to one API server.

    Args:
        configuration: from `load_configuration`.
    """

    def __init__(self, configuration: Any) -> None:
        self._client = kubernetes_client.ApiClient(configuration)
        self._client.user_agent = FIELD_MANAGER
        self.requests: Counter[str] = Counter()
        """Requests sent since the start, by verb."""

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self._client.configuration.host)

    async def close(self) -> None:
        await self._client.close()

    async def open_session(self, response_class: type[aiohttp.ClientResponse]) -> tuple[aiohttp.ClientSession, bool]:
        """Return another session to the same server, for kopf, and whether its credentials may expire.

        The caller closes it.
        """
        secrets = await self._client.configuration.auth_settings()
        headers = {secret["key"]: secret["value"] for secret in secrets.values()}
        connector = aiohttp.TCPConnector(ssl=self._client.rest_client.ssl_context)
        session = aiohttp.ClientSession(
            connector=connector, headers=headers, response_class=response_class, trust_env=True
        )
        return session, bool(headers)

    async def get(self, path: str) -> Document:
        return await self._document("get", "GET", path)

    async def create(self, path: str, body: Document) -> Document:
        return await self._document("create", "POST", path, body=body)

    async def replace(self, path: str, body: Document) -> Document:
        return await self._document("update", "PUT", path, body=body)

    async def apply(self, path: str, body: Document) -> Document:
        """Apply the fields of `body` server-side as ours; fields that we applied before and left out go."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._document("apply", "PATCH", path, body=body, query=query, content_type=APPLY_PATCH)

    async def merge(self, path: str, body: Document) -> Document:
        """Merge `body` into the object; null removes a field."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._document("patch", "PATCH", path, body=body, query=query, content_type=MERGE_PATCH)

    async def edit(self, path: str, steps: list[Document]) -> Document:
        """Carry out the steps of a JSON patch, all or none; `test` among them makes it a condition (422)."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._document("patch", "PATCH", path, body=steps, query=query, content_type=STEPS_PATCH)

    async def delete(self, path: str, *, uid: str) -> None:
        """Delete the object of this uid and, in the background, what it owns; one that is gone is fine."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._document("delete", "DELETE", path, body=body)
        except ApiError as error:
            if not (error.is_missing or error.is_conflict):
                raise

    async def pages(self, path: str, query: Mapping[str, str] | None = None) -> AsyncIterator[Document]:
        """Yield a list page by page: each has `items` and, in `metadata`, the resource version of the whole."""
        wanted = {**(query or {}), "limit": str(PAGE_OBJECTS)}
        while True:
            page = await self._document("list", "GET", path, query=wanted)
            yield page
            token = page["metadata"].get("continue")
            if not token:
                return
            wanted["continue"] = token

    async def list(self, path: str, query: Mapping[str, str] | None = None) -> tuple[list[Document], str]:
        """Return all objects and the resource version of the list."""
        items: list[Document] = []
        version = ""
        async for page in self.pages(path, query):
            items += page["items"]
            version = page["metadata"]["resourceVersion"]
        return items, version

    async def watch(
        self, path: str, *, query: Mapping[str, str], silence_seconds: float
    ) -> AsyncIterator[tuple[str, Document]]:
        """Yield (type, object) of each event, bookmarks too, until the server ends the stream.

        Raises:
            ApiError: refused, expired, or nothing arrived for `silence_seconds`.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        parameters = {**query, "watch": "true", "allowWatchBookmarks": "true"}
        try:
            response = await self._request("watch", "GET", path, query=parameters, limits=limits)
            async with response:
                async for line in _lines(response.content):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _refusal("watch", path, event["object"].get("code", 0), event["object"])
                    yield event["type"], event["object"]
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise ApiError(f"watch {path}: {error!r}") from error

    async def _document(
        self,
        verb: str,
        method: str,
        path: str,
        *,
        body: Body | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Document:
        limits = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS)
        try:
            response = await self._request(
                verb, method, path, body=body, query=query, content_type=content_type, limits=limits
            )
            async with response:
                document: Document = await response.json()
                return document
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise ApiError(f"{verb} {path}: {error!r}") from error

    async def _request(
        self,
        verb: str,
        method: str,
        path: str,
        *,
        limits: aiohttp.ClientTimeout,
        body: Body | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> aiohttp.ClientResponse:
        """Send one request; return the open response of a success, which the caller closes."""
        self.requests[verb] += 1
        request = await self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        response: aiohttp.ClientResponse = (await self._client.call_api(*request, _request_timeout=limits)).response
        if response.status >= 400:
            async with response:
                raise _refusal(verb, path, response.status, await _status(response))
        return response


async def _status(response: aiohttp.ClientResponse) -> Document:
    """Return the Status object of a refusal; proxies answer with other things."""
    text = (await response.text(errors="replace"))[:4096]
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    return document if isinstance(document, dict) else {"message": text}


def _refusal(verb: str, path: str, status: int, document: Document) -> ApiError:
    message = str(document.get("message", ""))[:1000]
    return ApiError(f"{verb} {path}: {status} {message}", status=status, reason=str(document.get("reason", "")))


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream, of any length (aiohttp's own loop refuses long ones)."""
    pieces: list[bytes] = []
    async for chunk in content.iter_any():
        first, *others = chunk.split(b"\n")
        pieces.append(first)
        for other in others:
            line = b"".join(pieces)
            pieces = [other]
            if line:
                yield line
