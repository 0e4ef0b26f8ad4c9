"""A chat-completions endpoint on this machine that does what a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What the endpoint does with one request.

    Attributes:
        text: The answer of the model.
        status: The HTTP status.
        body: The whole body, instead of a completion with the text.
        headers: More headers.
        delay: Seconds before anything is sent.
        hang_up: Close the connection without an answer.
    """

    text: str = ""
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    hang_up: bool = False


@dataclass
class Stub:
    """The endpoint.

    Attributes:
        url: Its base, as a user would give it.
        requests: Path, headers and body of each request, in order.
    """

    url: str
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)

    def prompts(self) -> list[str]:
        """The texts that it was asked."""
        contents = [body["messages"][0]["content"] for _, _, body in self.requests]
        return [one if isinstance(one, str) else one[0]["text"] for one in contents]


@contextmanager
def serving(answer: Callable[[int, str], Reply]) -> Iterator[Stub]:
    """Serve until the context is left.

    Args:
        answer: Gets the number of the request, from 0, and its prompt.
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(stub.requests)
                stub.requests.append((self.path, dict(self.headers), body))
            reply = answer(number, stub.prompts()[number])
            time.sleep(reply.delay)
            if reply.hang_up:
                self.close_connection = True
                return
            message = {"role": "assistant", "content": reply.text}
            plain = json.dumps({"choices": [{"message": message}]}).encode()
            data = plain if reply.body is None else reply.body
            try:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # the client did not wait so long

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub = Stub(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
