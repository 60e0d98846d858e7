"""The page in a real browser: it draws, cancels, downloads and asks nobody but its own server."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from ditile.plan.plan import Plan
from ditile.plan.schedule import PatchSchedule
from ditile.serve.api_keys import COOKIE, ApiKeys
from ditile.serve.page.insight import list_key_ages, render_freshness, render_gantt
from ditile.serve.page.login import is_page_path
from tests.serve.running import RunningServer, run_server
from tests.serve.test_replica import write_lora

CHROMIUM = shutil.which("chromium")
ANN, BOB, CLEO = "key-of-ann", "key-of-bob", "key-of-cleo"
FLUX, WAN = "shapes-flux · pipefusion=2", "shapes-wan · one rank"
"""What the page says of the models that are served."""
PROMPT = "a small blue square on the right on a gray background"
SCROLL_WIDTH = "document.documentElement.scrollWidth"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine's path")


def test_a_word_of_a_cookie_stands_for_its_key_and_no_other() -> None:
    """A failure would be an open door, or a closed one."""
    keys = ApiKeys([("ann", ANN.encode()), ("bob", BOB.encode())])
    key = keys.find_key(BOB.encode())
    assert key is not None
    word = key.word.decode()
    assert BOB not in word
    assert keys.find_key_of_cookie(f"a=b; {COOKIE}={word}") == key
    assert key.owner == "bob"
    assert keys.find_key(b"key-of-eve") is None
    assert [
        keys.find_key_of_cookie(text) for text in ("", f"{COOKIE}=", f"{COOKIE}={word[:-1]}", f"{COOKIE}={BOB}")
    ] == [None] * 4
    assert ApiKeys([("bob", BOB.encode())]).find_key(BOB.encode()) != key, "the next server asks again"


def test_only_what_the_page_needs_of_gradio_is_served() -> None:
    """A failure would serve what reads addresses of other hosts, or runs handlers under names of an API."""
    assert all(map(is_page_path, ("/", "/config", "/assets/a.js", "/gradio_api/queue/join", "/gradio_api/file=/a.png")))
    others = (
        "/gradio_api/proxy=http://a",
        "/gradio_api/info",
        "/gradio_api/call/draw",
        "/gradio_api/vibe-edit",
        "/v1/plan",
    )
    assert not any(map(is_page_path, others))


def test_the_map_of_ages_is_that_of_the_schedule() -> None:
    """A failure would draw what ditile does not do."""
    ages = list_key_ages(PatchSchedule.from_plan(Plan(pipefusion=2, patches=2), 2))
    assert ages == [(0, [0, 0]), (0, [0, 0]), (1, [0, 1]), (1, [0, 0])]
    ages = list_key_ages(PatchSchedule.from_plan(Plan(distrifusion=2), 2))
    assert ages[2:] == [(1, [0, 1]), (1, [1, 0])]
    assert "Every key is fresh" in render_freshness(PatchSchedule.from_plan(Plan(), 3))


def test_the_chart_has_a_bar_for_each_micro_step_with_a_text() -> None:
    """A failure would be an empty chart."""
    event = {"name": "compute p1", "cat": "compute", "ph": "X", "tid": 1, "ts": 5.0, "dur": 9e3}
    chart = render_gantt({"traceEvents": [event | {"args": {"step": 2, "patch": 1}}]})
    assert "<title>rank 1, step 3: compute p1, 9.0 ms</title>" in chart
    assert "no trace" in render_gantt({})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("page")
    keys, loras = folder / "keys", folder / "loras"
    keys.write_text(f"ann:{ANN}\nbob:{BOB}\ncleo:{CLEO}\n")
    loras.mkdir()
    write_lora(loras / "ink.safetensors", 3)
    flags = ("--pipefusion", "2", "--api-key", str(keys), "--lora-dir", str(loras))
    with run_server("shapes-flux", *flags, state=folder / "state", page=True) as running:
        yield running


@pytest.fixture(scope="module")
def video_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("video-page")
    keys = folder / "keys"
    keys.write_text(f"ann:{ANN}\n")
    with run_server("shapes-wan", "--api-key", str(keys), state=folder / "state", page=True) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser: Any, server: RunningServer) -> Iterator[Any]:
    """A tab of Ann's."""
    with open_tab(browser, server, ANN, FLUX) as page:
        yield page


@contextlib.contextmanager
def open_tab(browser: Any, server: RunningServer, key: str, title: str) -> Iterator[Any]:
    """A tab of a key; at its end there were no errors in it, and it has asked no other host."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        page.set_default_timeout(90_000)
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: wrong.append(asked.url) if not _is_own(asked.url, server) else None)
        log_in(page, server, key, title)
        yield page
        assert not wrong


def _is_own(url: str, server: RunningServer) -> bool:
    return url.startswith((f"{server.url}/", "data:", "blob:"))


def log_in(page: Any, server: RunningServer, key: str, title: str = FLUX) -> None:
    page.goto(server.url)
    page.get_by_label("Key of this server").fill(key)
    page.keyboard.press("Enter")
    page.get_by_text(title).wait_for()


def begin_drawing(page: Any, steps: int, prompt: str = PROMPT) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_label("Steps", exact=True).fill(str(steps))
    page.get_by_role("button", name="Generate", exact=True).click()


@needs_browser
def test_without_a_key_there_is_only_the_form(server: RunningServer, browser: Any) -> None:
    """A failure would be a hole in the wall around the server."""
    with server.client() as client:
        for path in ("/config", "/gradio_api/queue/data?session_hash=a", "/gradio_api/file=/etc/passwd", "/v1/plan"):
            assert client.get(path).status_code == 401, path
        assert client.post("/gradio_api/queue/join", json={"data": [], "fn_index": 0}).status_code == 401
        assert client.get("/", headers={"accept": "text/html"}).headers["location"] == "/login"
        assert "not known" in client.post("/login", content="key=key-of-eve").text
        entered = client.post("/login", content=f"key={ANN}")
        assert entered.status_code == 303 and "httponly" in entered.headers["set-cookie"].lower()
        assert client.get("/config").status_code == 200
        assert client.get("/v1/plan").status_code == 401, "the cookie is for the page alone"
        assert client.get("/gradio_api/file=/etc/passwd").status_code in (403, 404)
        assert client.get("/gradio_api/info").status_code in (401, 404)


HOSTILE_EVENTS: list[tuple[str, Any]] = [
    ("queue/join", {"fn_index": 99, "session_hash": "a", "data": []}),
    ("queue/join", {"fn_index": None, "session_hash": "a", "data": []}),
    ("queue/join", {"fn_index": [], "session_hash": "\ud800", "data": {}}),
    ("reset", {"event_id": {"a": "\ud800"}}),
    ("cancel", {"session_hash": 3, "fn_index": "x"}),
    ("cancel", []),
]


def test_events_that_the_page_does_not_send_are_refused(server: RunningServer) -> None:
    """A failure would mean a traceback in the log, and 500, for whoever sends them."""
    since = len(server.log)
    with server.client() as client:
        client.post("/login", content=f"key={ANN}")
        for path, values in HOSTILE_EVENTS:
            answer = client.post(f"/gradio_api/{path}", content=json.dumps(values).encode())
            assert 400 <= answer.status_code < 500, answer.text
        assert client.get("/gradio_api/queue/data?session_hash=nobody").status_code == 404
        # Those of the page, with what it does not send.
        for number in range(6):
            for data in ([], ["x"], [{"a": 1}] * 16, [None] * 2):
                event = {"fn_index": number, "session_hash": "b", "data": data, "event_data": {"index": "x"}}
                client.post("/gradio_api/queue/join", json=event)
        with client.stream("GET", "/gradio_api/queue/data?session_hash=b") as news:
            assert any("close_stream" in line for line in news.iter_lines())
        assert client.get("/config").status_code == 200
    assert "Traceback" not in server.log[since:]


@needs_browser
def test_it_draws_with_previews_says_what_was_done_and_downloads(tab: Any, server: RunningServer, browser: Any) -> None:
    """A failure would mean that a person cannot draw."""
    begin_drawing(tab, 8)
    tab.locator("#now img").wait_for()
    tab.get_by_text("Generated in").wait_for()
    tab.get_by_role("button", name="What ditile did").click()
    charts = tab.locator("#insight svg")
    charts.nth(1).wait_for()
    assert charts.count() == 2
    assert "whole step" in tab.locator("#insight").inner_text()
    with tab.expect_download() as caught:
        tab.get_by_role("button", name="Download", exact=True).click()
    seed = tab.get_by_label("Seed", exact=True).input_value()
    assert caught.value.suggested_filename == f"shapes-flux-{seed}.png"
    picture = Image.open(io.BytesIO(Path(caught.value.path()).read_bytes()))
    assert picture.size == (128, 128) and picture.info["prompt"] == PROMPT and picture.info["seed"] == seed

    tab.get_by_label("Prompt", exact=True).fill("something else")
    tab.get_by_role("button", name="Put settings back").click()
    tab.wait_for_function("text => document.querySelector('textarea').value === text", arg=PROMPT)
    assert tab.get_by_label("Seed", exact=True).input_value() == seed
    assert not tab.get_by_label("Random seed").is_checked()
    with browser.new_context() as other:
        page = other.new_page()
        log_in(page, server, BOB)
        assert page.locator("#gallery img").count() == 0, "Bob sees Ann's picture"


def download(page: Any) -> tuple[str, bytes]:
    """The name and the content of the chosen picture, or video."""
    with page.expect_download() as caught:
        page.get_by_role("button", name="Download", exact=True).click()
    return caught.value.suggested_filename, Path(caught.value.path()).read_bytes()


def draw_again(page: Any, kind: str) -> None:
    """Draws what is chosen once more; returns when there are two in the gallery."""
    page.get_by_role("button", name="Generate again").click()
    page.locator(f"#gallery .grid-wrap {kind}").nth(1).wait_for()
    page.get_by_text("Generated in").wait_for()


def is_cut_off(page: Any) -> bool:
    """Whether the gallery is less high than what is in it."""
    return bool(
        page.evaluate("(([g]) => g.scrollHeight > g.clientHeight + 1)(document.querySelectorAll('.grid-wrap'))")
    )


@needs_browser
def test_a_picture_and_a_lora_go_in_and_it_is_drawn_again(server: RunningServer, browser: Any, tmp_path: Path) -> None:
    """A failure would mean a form that asks for another picture than it shows."""
    start = tmp_path / "start.png"
    Image.new("RGB", (128, 128), (0, 0, 200)).save(start)
    with open_tab(browser, server, CLEO, FLUX) as page:
        page.get_by_role("button", name="Start from an image").click()
        page.locator("input[type=file]").first.set_input_files(start)
        page.locator("img[src*='start.png']").wait_for()
        page.get_by_label("LoRA", exact=True).click()
        page.get_by_role("option", name="ink").click()
        begin_drawing(page, 4)
        page.get_by_text("Generated in").wait_for()
        page.get_by_text("LoRA ink 1").wait_for()
        assert "strength 0.6" in page.get_by_text("LoRA ink 1").inner_text()
        assert not is_cut_off(page), "a lone picture"
        name, content = download(page)
        texts = Image.open(io.BytesIO(content)).info
        assert texts["loras"] == '{"ink": 1.0}' and '"strength": 0.6' in texts["settings"]
        draw_again(page, "img")
        assert download(page) == (name, content)


@needs_browser
def test_videos_are_drawn_shown_and_drawn_again(video_server: RunningServer, browser: Any) -> None:
    """A failure would mean a page for pictures alone."""
    with open_tab(browser, video_server, ANN, WAN) as page:
        assert not page.get_by_label("Images", exact=True).is_visible()
        page.get_by_label("Frames", exact=True).fill("5")
        begin_drawing(page, 2)
        page.get_by_text("Generated in").wait_for()
        page.locator("#gallery .grid-wrap video").wait_for()
        assert not is_cut_off(page), "a lone video"
        page.get_by_text("frames 5").wait_for()
        name, content = download(page)
        seed = page.get_by_label("Seed", exact=True).input_value()
        assert name == f"shapes-wan-{seed}.mp4" and content[4:8] == b"ftyp"
        draw_again(page, "video")
        assert download(page)[0] == name


@needs_browser
def test_cancel_ends_the_job_on_the_ranks(tab: Any, server: RunningServer) -> None:
    """A failure would leave ranks at work that nobody waits for."""
    begin_drawing(tab, 200)
    tab.get_by_text("Step ", exact=False).first.wait_for()
    tab.get_by_role("button", name="Cancel").click()
    # What was asked for is no error.
    said = tab.locator("#now p").filter(has_text="Cancelled.")
    said.wait_for()
    assert (said.get_attribute("role"), said.get_attribute("class")) == ("status", None)
    health = httpx.get(f"{server.url}/health", trust_env=False).json()
    assert (health["running"], health["waiting"]) == (0, 0)
    begin_drawing(tab, 0)
    tab.get_by_role("alert").filter(has_text="num_inference_steps=0 ").filter(
        has_text="try num_inference_steps=20"
    ).wait_for()


@needs_browser
def test_it_fits_a_phone_in_the_dark_and_a_keyboard(tab: Any) -> None:
    """A failure would mean that some cannot use it."""
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.emulate_media(color_scheme="dark")
    assert tab.evaluate(SCROLL_WIDTH) <= 390
    tab.get_by_label("Images").fill("3")
    begin_drawing(tab, 4, f"{PROMPT} {'of-a-word-without-end' * 6}")
    tab.get_by_text("Generated in").wait_for()
    tab.get_by_role("button", name="What ditile did").click()
    tab.get_by_role("button", name="Start from an image").click()
    tab.locator("#insight svg").nth(1).wait_for()
    assert tab.evaluate(SCROLL_WIDTH) <= 390
    red, green, blue = tab.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3).map(Number)"
    )
    assert max(red, green, blue) < 64
    tab.get_by_label("Prompt", exact=True).focus()
    for _ in range(8):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.innerText") == "Generate":
            return
    raise AssertionError("Tab does not lead from the prompt to Generate")
