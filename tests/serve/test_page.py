"""The page: what of Gradio strangers and other pages reach, and what a person does with it in a real browser."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.serve.servers import Served, paint_picture, read_error, serve_painted

CHROMIUM = shutil.which("chromium")
KEY = "key-of-ann"
SHOWS_KEY = {"authorization": f"Bearer {KEY}"}
PROMPT = "a small blue square on the right on a gray background"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine's path")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Ranks that paint: what the page does with an image does not depend on what is in it."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "loras").mkdir()
    (folder / "loras" / "ink.safetensors").touch()
    (folder / "keys").write_text(f"ann:{KEY}\n")
    (folder / "keys").chmod(0o600)
    flags = {"api_key": str(folder / "keys"), "lora_dir": str(folder / "loras")}
    with serve_painted(folder / "state", page=True, **flags) as served:
        yield served


@pytest.fixture
def outside() -> Iterator[tuple[str, list[str]]]:
    """Another server of this machine, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<script>")

        do_HEAD = do_GET  # noqa: N815

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def list_gradio_routes(served: Served, value: str) -> list[tuple[str, str]]:
    """Methods and paths of all routes of the API of Gradio, with a value for each parameter."""
    routes: list[tuple[str, str]] = []
    page: Any = served.app.router.routes[-1]
    # Gradio has put them into a router of their own.
    for part in page.app.routes:
        for route in part.original_router.routes if hasattr(part, "original_router") else ():
            path = re.sub(r"{[^}]*}", value, route.path)
            if path.startswith("/gradio_api/"):
                routes += [(method, path) for method in route.methods]
    return routes


@pytest.mark.parametrize("value", ["{outside}/x.png", "%00", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "x" * 5000])
def test_of_gradio_only_the_files_of_the_page_are_open(
    served: Served, outside: tuple[str, list[str]], value: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure would let a stranger, or any page in a browser, have the server fetch addresses, read files, keep
    uploads, or write tracebacks; each route of this release of Gradio is tried, and the form for keys that was here.
    """
    address, asked = outside
    routes = list_gradio_routes(served, value.format(outside=address))
    assert len(routes) > 40
    path = {"path": f"{address}/x.png", "url": f"{address}/x.png", "meta": {"_type": "gradio.FileData"}}
    event = {"data": [path] * 14, "fn_index": 0, "session_hash": "s", "path": ""}
    for method, path_sent in [*routes, ("POST", "/login"), ("POST", "/"), ("POST", "/gradio_api/component_server")]:
        body = None if method in ("GET", "HEAD") else event
        is_open = path_sent == "/"
        if not is_open:
            assert served.client.request(method, path_sent, json=body).status_code == 401, path_sent
        answer = served.client.request(method, path_sent, json=body, headers=SHOWS_KEY)
        assert answer.status_code in (404, 405), (method, path_sent)
        if method != "HEAD":
            read_error(answer)
    for path_sent in (f"/static/{value}", f"/assets/{value}", "/static/", "/static/fonts", f"/config/{value}"):
        answer = served.client.get(path_sent.format(outside=address), headers=SHOWS_KEY)
        assert answer.status_code == 404 and read_error(answer)
    assert not asked and not [record for record in caplog.records if record.exc_info]


def test_what_the_page_answers_depends_on_nothing_that_is_sent(served: Served, outside: tuple[str, list[str]]) -> None:
    """A failure would show it in the frame of another page, or to a page of another port, or with links to others."""
    address, asked = outside
    plain = served.client.get("/config")
    hostile = {"origin": "http://localhost:1", "cookie": "a=b"}
    hostile |= {"x-forwarded-host": "evil.example", "x-forwarded-for": "x"}
    answer = served.client.get(f"/config?deep_link=../../x&page={address}", headers=hostile)
    assert answer.status_code == plain.status_code == 200 and answer.content == plain.content
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert KEY.encode() not in plain.content and str(Path.home()).encode() not in plain.content
    assert read_error(served.client.get("/", headers={"host": "evil.com@localhost"}))["code"] == "bad_host"
    assert not asked


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser: Any, served: Served) -> Iterator[Any]:
    """A tab in which the key was entered."""
    served.group.pace = 0.0
    with open_tab(browser, served.url) as page:
        enter_key(page, KEY)
        page.get_by_text("shapes-flux").wait_for()
        yield page


@contextlib.contextmanager
def open_tab(browser: Any, url: str) -> Iterator[Any]:
    """A tab of the page; at its end there were no errors in it but of keys, and it has asked no other host."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        page.set_default_timeout(90_000)
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        own = (f"{url}/", "data:", "blob:")
        page.on("request", lambda asked: None if asked.url.startswith(own) else wrong.append(asked.url))
        page.goto(url)
        yield page
        assert not [text for text in wrong if "the server responded with a status of 4" not in text]


def enter_key(page: Any, key: str) -> None:
    page.get_by_label("Key of this server").fill(key)
    page.keyboard.press("Enter")


def begin_drawing(page: Any, prompt: str = PROMPT, **fields: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    for label, value in fields.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_role("button", name="Generate", exact=True).click()


def download(page: Any) -> tuple[str, bytes]:
    """The name and the content of the newest result."""
    with page.expect_download() as caught:
        page.get_by_role("link", name="Download").first.click()
    return caught.value.suggested_filename, Path(caught.value.path()).read_bytes()


@needs_browser
def test_it_asks_for_a_key_and_keeps_it_nowhere(served: Served, browser: Any) -> None:
    """A failure would be a page that is shut, or a key that the next page of this address could read."""
    with open_tab(browser, served.url) as page:
        page.get_by_text("Enter a key of this server.").wait_for()
        enter_key(page, "key-of-eve")
        page.get_by_role("alert").filter(has_text="the key is not known").wait_for()
        enter_key(page, KEY)
        page.get_by_text("shapes-flux").wait_for()
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        page.reload()
        page.get_by_text("Enter a key of this server.").wait_for()


@needs_browser
def test_it_shows_steps_previews_and_an_image_that_can_be_downloaded(tab: Any, served: Served) -> None:
    """A failure would mean that a person cannot draw."""
    served.group.pace = 0.3
    begin_drawing(tab, Steps="6", Seed="7", Images="2")
    tab.get_by_text(re.compile(r"Step \d of 6")).wait_for()
    tab.locator("#ditile-preview").wait_for()
    tab.get_by_text("Generated.").wait_for()
    assert tab.locator("#ditile-gallery img").count() == 2 and not tab.locator("#ditile-preview").is_visible()
    assert download(tab) == ("shapes-flux-8.png", paint_picture((128, 128), 8))
    assert not tab.get_by_label("Frames", exact=True).is_visible()


@needs_browser
def test_cancel_ends_the_job_and_a_refusal_is_shown(tab: Any, served: Served) -> None:
    """A failure would leave ranks at work that nobody waits for, or a person without a word."""
    served.group.pace = 0.3
    begin_drawing(tab, Steps="100")
    tab.get_by_text(re.compile(r"Step \d+ of 100")).wait_for()
    tab.get_by_role("button", name="Cancel").click()
    tab.get_by_role("status").filter(has_text="Cancelled.").wait_for()
    tab.wait_for_function("fetch('health').then((answer) => answer.json()).then((health) => health.running === 0)")
    begin_drawing(tab, Steps="0")
    tab.get_by_role("alert").filter(has_text="try num_inference_steps=20").wait_for()
