"""Who may see the page: a browser sends no key by itself, so the page asks for it once and answers with a cookie."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, RedirectResponse

COOKIE = "ditile_page"
LOGIN_PATH = "/login"
_PAGE_PATHS = re.compile(
    r"/(?:config/?|theme\.css|manifest\.json|favicon\.ico|(?:static|assets|svelte)/.*|gradio_api/(?:app_id/?|heartbeat/.*"
    r"|startup-events|theme\.css|file=.*|queue/(?:join/?|data)|upload/?|upload_progress|reset/?|cancel/?))?"
)
"""What of Gradio the page needs; nothing else of it is served."""
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


class PageKeys:
    """The keys of a server, and for each a word that a cookie holds in its place while the server runs.

    Args:
        keys: (owner, key).
    """

    def __init__(self, keys: Sequence[tuple[str, bytes]]) -> None:
        secret = secrets.token_bytes(32)
        self._keys = [(owner, key, hmac.digest(secret, key, "sha256").hex()) for owner, key in keys]

    def find_word(self, key: str) -> str | None:
        """The word of a key; None if the key is not known."""
        given = key.strip().encode()
        found = None
        for _, known, word in self._keys:
            # Each is compared, so that the time says nothing of which one is nearly right.
            if hmac.compare_digest(known, given) and found is None:
                found = word
        return found

    def find_owner(self, cookies: str) -> str | None:
        """The owner of the key whose word is among the cookies of a request; None if there is none."""
        try:
            morsel = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            return None
        given = ("" if morsel is None else morsel.value).encode()
        found = None
        for owner, _, word in self._keys:
            if hmac.compare_digest(word.encode(), given) and found is None:
                found = owner
        return found


def is_page_path(path: str) -> bool:
    """Whether a path belongs to the page."""
    return _PAGE_PATHS.fullmatch(path) is not None


@router.get(LOGIN_PATH)
async def ask_for_key() -> Response:
    """A form that asks for the key."""
    return _answer_form("")


@router.post(LOGIN_PATH)
async def take_key(http: HttpRequest) -> Response:
    """Opens the page to who has a key."""
    keys: PageKeys = http.app.state.page_keys
    given = parse_qs((await http.body()).decode("utf-8", "replace")).get("key", [""])[0]
    word = keys.find_word(given)
    if word is None:
        return _answer_form('<p role="alert">This key is not known.</p>')
    answer = RedirectResponse("/", status_code=303)
    answer.set_cookie(COOKIE, word, httponly=True, samesite="strict", secure=http.url.scheme == "https")
    return answer


def _answer_form(note: str) -> Response:
    return HTMLResponse(_FORM.format(path=LOGIN_PATH, note=note), headers={"cache-control": "no-store"})
