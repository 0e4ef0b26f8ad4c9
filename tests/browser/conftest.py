"""A served demo and a browser that reports every request that leaves this machine.

Set RAINCHECK_SCREENSHOTS to a folder to have pictures of the page's main states saved there.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    # The browser's own errands would be outside requests, too.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
DESK = {"width": 1280, "height": 800}
_LOCAL = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}


@pytest.fixture(scope="session")
def outgoing() -> Iterator[list[str]]:
    """Addresses outside this machine that the server's process connected to."""
    found: list[str] = []
    stock = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> Any:
        if isinstance(address, tuple) and address[0] not in _LOCAL:
            found.append(str(address))
            raise OSError("the demo may not leave this machine")
        return stock(self, address)

    socket.socket.connect = connect  # type: ignore[method-assign]
    yield found
    socket.socket.connect = stock  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def app(outgoing: list[str]) -> Iterator[Any]:
    """The demo on the small models, served on a free port; its address is ``app.url``."""
    pytest.importorskip("gradio", reason="the demo's page needs gradio")
    sys.path.insert(0, str(Path(__file__).parents[2] / "demos"))
    import gradio_app

    models = gradio_app.Models()
    for name in models.names:
        models.get(name)
    app = gradio_app.App(models)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    demo = gradio_app.serve(app, "127.0.0.1", port, wait=False)
    app.url = demo.local_url  # type: ignore[attr-defined]
    yield app
    demo.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, headless."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def profile(browser: Any) -> Any:
    """One profile for all tests, so that its cache holds the page's scripts after the first."""
    context = browser.new_context()
    context.set_default_timeout(30_000)
    return context


@pytest.fixture
def open_tab(app: Any, profile: Any, outgoing: list[str]) -> Iterator[Callable[..., Any]]:
    """Opens tabs; fails the test on outside requests and on errors of the page's scripts."""
    asked: list[str] = []
    errors: list[str] = []
    tabs: list[Any] = []

    def open_one(viewport: dict[str, int] = DESK) -> Any:
        page = profile.new_page()
        tabs.append(page)
        page.set_viewport_size(viewport)
        page.on("request", lambda request: asked.append(request.url))
        page.on("websocket", lambda channel: asked.append(channel.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(app.url)
        page.wait_for_selector("#attached img")
        return page

    yield open_one
    for page in tabs:
        page.close()
    hosts = {urlsplit(url).hostname for url in asked if not url.startswith(("data:", "blob:"))}
    assert hosts == {"127.0.0.1"}, "the page asked for something outside this machine"
    assert outgoing == [], "the server asked for something outside this machine"
    assert errors == [], "the page's scripts failed"


@pytest.fixture
def tab(open_tab: Callable[..., Any]) -> Any:
    """One tab at 1280×800."""
    return open_tab()


@pytest.fixture
def save() -> Callable[[Any, str], None]:
    """Saves a screenshot under a name, where that was asked for."""
    folder = os.environ.get("RAINCHECK_SCREENSHOTS")

    def shoot(page: Any, name: str) -> None:
        if folder:
            page.screenshot(path=str(Path(folder) / f"demo-{name}.png"))

    return shoot
