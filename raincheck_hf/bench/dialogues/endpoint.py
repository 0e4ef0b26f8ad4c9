"""A model behind an OpenAI-compatible chat-completions endpoint, by the standard library alone."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

_LONGEST_WAIT = 60.0
_WORTH_RETRYING = (408, 409, 425, 429)


class EndpointError(Exception):
    """The endpoint did not give an answer, and asking on is pointless."""


class _Passing(Exception):
    """One attempt failed in a way that may pass; holds how long the server asks to wait."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key goes to the URL that the user gave, and nowhere else."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


@dataclass(frozen=True)
class Endpoint:
    """Where a judge answers.

    Attributes:
        url: `http://host:8000/v1`, or the whole path with `/chat/completions`.
        model: The model's name there.
        key: Sent as a bearer token if there is one; appears in no message and no file.
        timeout: Seconds a request may take.
        retries: Attempts after the first one.
        backoff: Seconds before the first retry; doubled for each further one.

    Raises:
        ValueError: A URL, key or number that cannot be used.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    timeout: float = 120.0
    retries: int = 4
    backoff: float = 1.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be http://… or https://…; got {self.url!r}")
        if parts.username or parts.password or parts.query:
            raise ValueError(
                "url must be without user, password and query; a key goes into an environment "
                "variable"
            )
        path = self.url.rstrip("/")
        if not path.endswith("/chat/completions"):
            path += "/chat/completions"
        object.__setattr__(self, "url", path)
        key = (self.key or "").strip()
        if not key.isascii() or any(letter.isspace() for letter in key):
            raise ValueError("the key holds blanks or letters that no HTTP header can carry")
        object.__setattr__(self, "key", key or None)
        if not self.timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds; got {self.timeout}")
        if self.retries < 0:
            raise ValueError(f"retries must be 0 or more; got {self.retries}")

    def reply(self, content: str | list[dict[str, Any]]) -> str:
        """Ask one thing, at temperature 0.

        Args:
            content: The user's message: a text, or parts as the protocol has them.

        Returns:
            The text of the answer.

        Raises:
            EndpointError: The request was refused, or every attempt failed.
        """
        message = {"role": "user", "content": content}
        body = {"model": self.model, "messages": [message], "temperature": 0}
        attempt = 0
        while True:
            try:
                return self._attempt(json.dumps(body).encode())
            except _Passing as failure:
                if attempt == self.retries:
                    raise EndpointError(
                        f"{self.url}: no answer after {attempt + 1} attempt(s); the last one: "
                        f"{failure}"
                    ) from failure
                wait = self.backoff * 2**attempt if failure.wait is None else failure.wait
                time.sleep(min(wait, _LONGEST_WAIT))
                attempt += 1

    def _attempt(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
        try:
            with _opener.open(request, timeout=self.timeout) as response:
                raw = response.read()
        except urllib.error.HTTPError as error:
            self._refused(error)
        except (OSError, HTTPException) as error:  # no connection, a broken one, or too late
            raise _Passing(self._safe(f"{type(error).__name__}: {error}")) from error
        text = _text_of(self._safe(raw.decode("utf-8", errors="replace")))
        if text is None:
            raise _Passing("the reply is no chat completion")
        return text

    def _refused(self, error: urllib.error.HTTPError) -> None:
        said = self._safe(error.read().decode("utf-8", errors="replace"))[:300]
        what = f"HTTP {error.code} {error.reason}: {said}".strip()
        if error.code in _WORTH_RETRYING or error.code >= 500:
            raise _Passing(what, _seconds(error.headers.get("Retry-After"))) from error
        raise EndpointError(f"{self.url}: {what}") from error

    def _safe(self, text: str) -> str:
        """A server may echo what it was sent."""
        return text.replace(self.key, "***") if self.key else text


def _seconds(text: str | None) -> float | None:
    """A `Retry-After` in seconds; its other form, a date, is ignored."""
    return float(text) if text is not None and text.strip().isdigit() else None


def _text_of(body: str) -> str | None:
    """The text of a chat completion; None if the body is none."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    if isinstance(content, list):  # some servers answer in parts
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) and content.strip() else None
