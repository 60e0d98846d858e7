"""The page: a form rendered by Gradio, with buttons that call the server's own API from the browser.

Its events never reach Gradio's server: `page.js` sends the form to the routes of the API. So only the routes of Gradio
that load the page are mounted, and they accept no input.
"""

from __future__ import annotations

import json
from pathlib import Path

import gradio as gr
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.routing import Match, Mount
from starlette.types import Message, Receive, Scope, Send

# The only headers that Gradio sees; origins, cookies and addresses of proxies are removed.
_HEADERS = (b"host", b"accept-encoding", b"if-none-match", b"if-modified-since")
# Gradio's own scripts are inline and use eval. No other page may embed this one, and it calls no other server.
_ANSWER_HEADERS = {
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; frame-ancestors 'none'; base-uri 'self'; form-action 'none'; object-src 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_CSS = """
.gradio-container {max-width: 1280px !important; margin: 0 auto;}
#ditile-results figure {margin: 0 0 1rem;}
#ditile-results img, #ditile-results video {max-width: 100%; max-height: 32rem; border-radius: .5rem; display: block;}
#ditile-preview {width: min(100%, 24rem);}
#ditile-said {min-height: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere;}
#ditile-bar {width: 100%; accent-color: var(--color-accent);}
#ditile-results [role=alert] {color: var(--error-text-color, #d33);}
#ditile-results [hidden], #ditile-edit[hidden] {display: none;}
#ditile-edit input {max-width: 100%;}
"""
_HEAD = """<meta name="color-scheme" content="light dark">
<style>@media (max-width: 640px) {.gradio-container .main.app {padding: .5rem !important;}}</style>
<script>%s</script>"""
_EDIT = """<label id="ditile-edit" hidden>Start from an image
<input id="ditile-image" type="file" accept="image/*"></label>"""
_RESULTS = """<div id="ditile-results"><p id="ditile-said" role="status"></p>
<div id="ditile-running" hidden><progress id="ditile-bar" max="1"></progress></div>
<img id="ditile-preview" alt="preview" hidden><div id="ditile-gallery"></div></div>"""


class PageMount(Mount):
    """Gradio's app, limited to the files of the page.

    Args:
        mounted: the route on which Gradio has mounted its app.
    """

    def __init__(self, mounted: Mount) -> None:
        super().__init__("", app=mounted.app)
        frontend = Path(gr.__file__).with_name("templates") / "frontend"
        self._paths = {"/", "/config", "/theme.css", "/manifest.json", "/favicon.ico"}
        for path in frontend.glob("*/**/*"):
            if path.is_file():
                self._paths.add(f"/{path.relative_to(frontend).as_posix()}")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match only requests that read a file of the page."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD") or scope["path"] not in self._paths:
            return Match.NONE, {}
        return super().matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer without the query and with only `_HEADERS`. Gradio would use the rest for paths and CORS rights."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_ANSWER_HEADERS)
            await send(message)

        headers = [(name, value) for name, value in scope["headers"] if name in _HEADERS]
        await super().handle({**scope, "headers": headers, "query_string": b""}, receive, send_with_headers)


def mount_page(app: FastAPI) -> None:
    """Add the page to an app."""
    script = Path(__file__).with_name("page.js").read_text("utf-8")
    gr.mount_gradio_app(
        app,
        build_blocks(),
        path="/",
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        # System fonts are used, because Gradio's own would come from other servers.
        theme=gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace")),
        css=_CSS,
        head=_HEAD % script,
        app_kwargs={"docs_url": None, "redoc_url": None, "openapi_url": None},
    )
    # Gradio has mounted itself as the last route.
    mounted = app.router.routes.pop()
    assert isinstance(mounted, Mount)
    app.router.routes.append(PageMount(mounted))


def build_blocks() -> gr.Blocks:
    """Return the form and the place of its results. The names of the fields are those of the API."""
    blocks: gr.Blocks
    with gr.Blocks(title="ditile", analytics_enabled=False) as blocks:
        title = gr.Markdown("# ditile")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                key = gr.Textbox(label="Key of this server", type="password", visible=False)
                fields = {"prompt": gr.Textbox(label="Prompt", lines=3, autofocus=True)}
                with gr.Row():
                    generate = gr.Button("Generate", variant="primary", min_width=120)
                    cancel = gr.Button("Cancel", variant="stop", min_width=120)
                fields["negative_prompt"] = gr.Textbox(label="Negative prompt", visible=False)
                gr.HTML(_EDIT, js_on_load=None)
                with gr.Row():
                    labels = {"width": "Width", "height": "Height", "num_inference_steps": "Steps", "n": "Images"}
                    labels |= {"num_frames": "Frames", "fps": "Frames a second", "guidance_scale": "Guidance"}
                    labels |= {"true_cfg_scale": "True CFG", "strength": "Strength", "seed": "Seed"}
                    # An empty field leaves the value to the model.
                    for name, label in labels.items():
                        fields[name] = gr.Textbox(label=label, min_width=140)
                    fields["lora"] = gr.Textbox(label="LoRA", visible=False, min_width=140)
            with gr.Column(scale=3, min_width=320):
                gr.HTML(_RESULTS, js_on_load=None)
        names = json.dumps(list(fields))
        form = [key, *fields.values()]
        enter = [blocks.load, key.submit, key.blur]
        gr.on(enter, None, [key], [title, *form], js=f"(key) => ditile.open({names}, key)")
        begin = [generate.click, fields["prompt"].submit]
        gr.on(begin, None, form, None, js=f"(...values) => {{ ditile.generate({names}, ...values); }}")
        cancel.click(None, None, None, js="() => ditile.cancel()")
    return blocks
