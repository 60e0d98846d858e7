"""Checks of requests to Gradio's routes before Gradio reads them: it would answer 500, or write a traceback."""

from __future__ import annotations

import logging
from typing import Any

import gradio as gr
from fastapi import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ditile.serve.api.answers import RequestError, answer_error
from ditile.serve.api.uploads import parse_json_object
from ditile.serve.jobs import shorten_line

LOG = logging.getLogger("ditile")
JOIN_PATH = "/gradio_api/queue/join"
EVENTS_PATH = "/gradio_api/queue/data"
# Paths of Gradio that take an object of JSON.
JSON_PATHS = (JOIN_PATH, "/gradio_api/reset", "/gradio_api/cancel")


class PageBlocks(gr.Blocks):
    """Blocks whose events are refused in one line where their values are not what the page sends."""

    async def process_api(self, *args: Any, **options: Any) -> Any:
        """Handles an event of the page."""
        try:
            return await super().process_api(*args, **options)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            LOG.warning("an event of the page was refused: %s", shorten_line(error, 200))
            LOG.debug("an event of the page was refused", exc_info=error)
            raise gr.Error("the page sent unexpected values; load it again", print_exception=False) from None


class PageGuard:
    """Passes on to Gradio's app what the page sends.

    Args:
        blocks: the page, whose events and sessions are known.
    """

    def __init__(self, app: ASGIApp, blocks: gr.Blocks) -> None:
        self._app = app
        self._blocks = blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HttpRequest(scope, receive)
        path = scope["path"].rstrip("/")
        try:
            if path == EVENTS_PATH:
                # Gradio would find out in the middle of its answer.
                if http.query_params.get("session_hash") not in self._blocks._queue.pending_messages_per_session:
                    raise RequestError("there is no such session; load the page again", status=404, code="not_found")
            elif path in JSON_PATHS and scope["method"] == "POST":
                body = await http.body()
                self._check_json(path, body)
                receive = _repeat_body(body, receive)
        except RequestError as error:
            await answer_error(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_json(self, path: str, body: bytes) -> None:
        values = parse_json_object(body)
        try:
            str(values).encode()
        except UnicodeEncodeError:
            raise RequestError("a text is no text of Unicode; leave it out", code="bad_json") from None
        number = values.get("fn_index")
        if path == JOIN_PATH and (not isinstance(number, int) or number not in self._blocks.fns):
            raise RequestError("there is no such event; load the page again", code="bad_json", param="fn_index")


def _repeat_body(body: bytes, receive: Receive) -> Receive:
    """Returns a body that was read once more, and then what follows."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        if messages:
            return messages.pop()
        return await receive()

    return receive_again
