"""The built site, served on this machine, and the system's Chromium. What is missing fails; no skips."""

import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest
from built_site import HTML
from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@pytest.fixture(scope="session")
def built() -> Path:
    if not (HTML / "book" / "index.html").is_file():
        pytest.fail("the site is not built: run `make site` first")
    return HTML


@pytest.fixture(scope="session")
def address(built: Path):
    """The site's root, on a free port of this machine."""
    handler = functools.partial(_Quiet, directory=str(built))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="session")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    binary = next(filter(None, map(shutil.which, names)), None)
    if binary is None:
        pytest.fail("no Chromium on this machine: `make browser` installs it or says what to do")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=binary, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Page:
    """A page in a context of its own: nothing stored, a laptop's size, light."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light")
    context.set_default_timeout(10_000)
    yield context.new_page()
    context.close()
