"""Mounts the page at the root of the server's app, or a line that says how to get it."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import PlainTextResponse
from starlette.routing import Match, Mount
from starlette.types import Scope

from ditile.distributed import env
from ditile.plan.extras import is_installed
from ditile.serve.api.answers import find_owner
from ditile.serve.page import login

if TYPE_CHECKING:
    from ditile.serve.service import Service

FOLDER = "page"
"""Of the state folder: uploads and pictures that the page shows; removed when a server starts."""
OWNER_MARK = "owner:"
"""Before the name of an owner, as Gradio takes an empty name for none."""


class PageMount(Mount):
    """The page, for the paths that it needs; the server's routes answer for all others."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether a request is for the page."""
        if scope["type"] != "http" or not login.is_page_path(scope["path"]):
            return Match.NONE, {}
        return super().matches(scope)


def mount_page(app: FastAPI, service: Service) -> None:
    """Adds the page to an app whose service has opened its state folder.

    Args:
        app: of the server; its lifespan runs the queue of the page.
        service: that draws.
    """
    if service.options.no_page or not is_installed("gradio"):
        hint = "serve without --no-page" if service.options.no_page else "pip install 'ditile[page]'"
        app.add_api_route("/", _build_note(hint), methods=["GET"], include_in_schema=False)
        return
    folder = service.options.find_state_folder().resolve() / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    env.set_page_variables(folder)
    import gradio

    from ditile.serve.page.guard import PageGuard
    from ditile.serve.page.layout import CSS, HEAD, Page, build_theme

    app.include_router(login.router, include_in_schema=False)
    blocks = Page(service, folder).build_blocks()
    gradio.mount_gradio_app(
        app,
        blocks,
        path="/",
        auth_dependency=_name_user,
        max_file_size=service.options.max_body,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        show_error=False,
        theme=build_theme(),
        css=CSS,
        head=HEAD,
        app_kwargs={"docs_url": None, "redoc_url": None},
    )
    mounted = app.router.routes.pop()
    assert isinstance(mounted, Mount)
    app.router.routes.append(PageMount("", app=PageGuard(mounted.app, blocks)))


def _name_user(http: HttpRequest) -> str:
    return OWNER_MARK + find_owner(http)


def _build_note(hint: str) -> Callable[[], Awaitable[PlainTextResponse]]:
    async def say_how_to_get_the_page() -> PlainTextResponse:
        """One line."""
        return PlainTextResponse(
            f"This is ditile's server, which has no page here; {hint}. Its routes: /openapi.json\n"
        )

    return say_how_to_get_the_page
