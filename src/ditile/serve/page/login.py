"""Access to the page: a browser sends no key by itself, so the page asks for it once and answers with a cookie."""

from __future__ import annotations

import re
from urllib.parse import parse_qs

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, RedirectResponse

from ditile.serve.api_keys import COOKIE, ApiKeys

LOGIN_PATH = "/login"
# What of Gradio the page needs; nothing else of it is served.
_PAGE_PATHS = re.compile(
    r"/(?:config/?|theme\.css|manifest\.json|favicon\.ico|(?:static|assets|svelte)/.*|gradio_api/(?:app_id/?|heartbeat/.*"
    r"|startup-events|theme\.css|file=.*|queue/(?:join/?|data)|upload/?|upload_progress|reset/?|cancel/?))?"
)
_FORM = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ditile</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<style>body{{font:16px system-ui,sans-serif;display:grid;place-items:center;min-height:90vh;margin:0 1rem}}
form{{display:grid;gap:.75rem;width:min(22rem,100%)}}input,button{{font:inherit;padding:.6rem}}p{{color:#d33;margin:0}}
</style></head><body><form method="post" action="{path}"><h1>ditile</h1>{note}
<label for="key">Key of this server</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<button>Open</button></form></body></html>"""

router = APIRouter()


def is_page_path(path: str) -> bool:
    """Whether a path belongs to the page."""
    return _PAGE_PATHS.fullmatch(path) is not None


@router.get(LOGIN_PATH)
async def ask_for_key() -> Response:
    """A form that asks for the key."""
    return _answer_form("")


@router.post(LOGIN_PATH)
async def take_key(http: HttpRequest) -> Response:
    """Opens the page to a browser that has a key."""
    keys: ApiKeys = http.app.state.keys
    fields = parse_qs((await http.body()).decode("utf-8", "replace"))
    key = keys.find_key(fields.get("key", [""])[0].strip().encode())
    if key is None:
        return _answer_form('<p role="alert">This key is not known.</p>')
    answer = RedirectResponse("/", status_code=303)
    answer.set_cookie(COOKIE, key.word.decode(), httponly=True, samesite="strict", secure=http.url.scheme == "https")
    return answer


def _answer_form(note: str) -> Response:
    return HTMLResponse(_FORM.format(path=LOGIN_PATH, note=note), headers={"cache-control": "no-store"})
