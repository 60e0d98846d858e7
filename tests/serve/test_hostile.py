"""Requests that mean harm, or mean nothing: none of them is answered with 5xx or a traceback, and none leaves a file.

The server goes on: behind each group of requests a plain one is drawn.
"""

import base64
import io
import json
import random
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from ditile.serve.api.fields import ImageFields, RemixFields, VideoFields
from tests.serve.servers import PROMPT, Served, paint_picture, read_error, read_metric, serve_painted

DRAW, EDIT = "/v1/images/generations", "/v1/images/edits"
NUM_FUZZED = 1000
PATHS = (
    "../../../etc/passwd",
    "/etc/passwd",
    "..%2f..%2fjobs.sqlite",
    "C:\\secret",
    "file:///etc/passwd",
    "~/x",
    "a\0b",
)
NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 64, 2**31, 2**63 - 1, 2**64, 10**30, -(10**40), 0.0, -0.5, 1e-320, 1e308, 3.5,
    "", " ", "4", "-4", "4.5", "1e999", "nan", "Infinity", "0x10", "٤", "true", "None", "[]", "{}", "auto", "64x64",
    "99999999x1", "0x0", "-1x-1", "64x", "x" * 300, "a\x00b", "\x1b[31m", "\u202e", "\ud800", "\U0001f600" * 50,
    "a\r\nSet-Cookie: a=b",
    "{0.__class__}", "%s%n", "<script>", "' OR 1=1 --", "${jndi:ldap://x}", "<lora:../../x:1>", *PATHS,
    [], {}, [[]], [None], [1, "2"], {"": ""},
    {"name": "x"}, {"name": 1, "scale": "y"}, {"image_url": {"url": []}}, {"a": {"b": {"c": []}}}, ["http://127.0.0.1/x"],
    "data:image/png;base64,", "data:image/png;base64,AAAA", "http://169.254.169.254/latest/meta-data", "AAAA",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module", params=["shapes-flux", "shapes-wan"])
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    limits = {"max_images": 3, "max_pixels": 256 * 256, "max_steps": 8, "max_frames": 17, "max_body": 2**20}
    with serve_painted(folder / f"state-{request.param}", request.param, **limits) as served:
        yield served


@pytest.fixture(autouse=True)
def nothing_is_left_behind(served: Served, folder: Path) -> Iterator[None]:
    here = set(Path.cwd().iterdir())
    yield
    assert {path.name.partition("-")[0] for path in folder.iterdir()} == {"state"}
    assert set(Path.cwd().iterdir()) == here
    path = "/v1/videos" if served.service.facts.is_video else DRAW
    assert served.post(path, {"prompt": PROMPT}).status_code == 200
    assert served.client.get("/health").status_code == 200


def check_answer(answer: httpx.Response) -> int:
    """Checks that an answer is one of a server that understood enough; returns its status."""
    assert answer.status_code < 500, (answer.status_code, answer.text[:500])
    assert "Traceback" not in answer.text and 'File "' not in answer.text
    if answer.status_code >= 400:
        read_error(answer)
    return answer.status_code


def list_schemas() -> list[tuple[str, list[str]]]:
    """Routes and the fields that they know."""
    return [
        (DRAW, list(ImageFields.model_fields)),
        (EDIT, [*ImageFields.model_fields, "image", "image[]", "mask", "url", "images", "mask_image"]),
        ("/v1/images/variations", [*ImageFields.model_fields, "image"]),
        ("/v1/videos", [*VideoFields.model_fields, "input_reference"]),
        ("/v1/videos/video_x/remix", list(RemixFields.model_fields)),
    ]


def test_requests_fuzzed_by_schema(served: Served) -> None:
    chance, schemas = random.Random(0), list_schemas()
    statuses = []
    for _ in range(NUM_FUZZED // 2):
        path, names = chance.choice(schemas)
        values: dict[str, Any] = {"prompt": PROMPT} if chance.random() < 0.8 else {}
        for _ in range(chance.randint(0, 4)):
            name = chance.choice(names) if chance.random() < 0.9 else str(chance.choice(NASTY))
            values[name] = chance.choice(NASTY)
        if chance.random() < 0.3:
            texts = {name.replace("\ud800", "?"): str(value).replace("\ud800", "?") for name, value in values.items()}
            files = {"image": chance.choice([paint_picture((32, 32), 1), b"", b"GIF89a", b"\x89PNG\r\n\x1a\n" * 9])}
            statuses.append(
                check_answer(served.client.post(path, data=texts, files=files if chance.random() < 0.8 else None))
            )
        else:
            statuses.append(check_answer(served.client.post(path, content=json.dumps(values).encode())))
    assert {200, 400, 422} <= set(statuses) and statuses.count(200) > 20


def build_png(width: int, height: int, content: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """A PNG of any claims."""

    def build_chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = build_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    chunks = [head, *(build_chunk(*one) for one in more), build_chunk(b"IDAT", content), build_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def list_bombs() -> dict[str, bytes]:
    zeros = zlib.compress(b"\0" * 2**24, 9)
    gif = io.BytesIO()
    frames = [Image.new("P", (64, 64), k) for k in range(200)]
    frames[0].save(gif, "gif", save_all=True, append_images=frames[1:])
    webp = io.BytesIO()
    Image.new("RGB", (3000, 3000)).save(webp, "webp", lossless=True)
    whole = paint_picture((64, 64), 1)
    return {
        "claims a billion pixels": build_png(60000, 60000, zeros),
        "claims no pixels": build_png(0, 0, zeros),
        "more data than pixels": build_png(64, 64, zeros),
        "a text of 16 MB": build_png(64, 64, zlib.compress(bytes(64 * 193)), (b"zTXt", b"a\0\0" + zeros)),
        "a profile of 16 MB": build_png(64, 64, zlib.compress(bytes(64 * 193)), (b"iCCP", b"a\0\0" + zeros)),
        "many frames": gif.getvalue(),
        "larger than allowed": webp.getvalue(),
        "cut short": whole[:60],
        "wrong checksum": whole[:40] + b"\0" + whole[41:],
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n(x) run",
        "TIFF": b"II*\0\x08\0\0\0" + b"\xff" * 64,
        "text": b"not a picture", "nothing": b"",
    }  # fmt: skip


BOMBS = list_bombs()
MAY_BE_READ = {"more data than pixels", "a text of 16 MB", "a profile of 16 MB", "many frames"}


@pytest.mark.parametrize("name", BOMBS)
def test_pictures_that_are_bombs(served: Served, name: str) -> None:
    content = BOMBS[name]
    text = base64.b64encode(content).decode()
    for answer in (
        served.client.post(EDIT, data={"prompt": PROMPT}, files={"image": ("../../x.png", content, "image/png")}),
        served.post(EDIT, {"prompt": PROMPT, "image": "data:image/png;base64," + text}),
        served.client.post(EDIT, data={"prompt": PROMPT}, files={"image": paint_picture((64, 64), 1), "mask": content}),
        served.client.post("/v1/videos", data={"prompt": PROMPT}, files={"input_reference": content}),
    ):
        assert check_answer(answer) != 200 or name in MAY_BE_READ


def test_forms_that_are_none(served: Served) -> None:
    part = b'Content-Disposition: form-data; name="prompt"\r\n\r\na circle\r\n'
    bodies = {
        "multipart/form-data": b"--x\r\n" + part + b"--x--",
        "multipart/form-data; boundary=": b"--\r\n" + part,
        "multipart/form-data; boundary=x": b"--x\r\n" + part,
        "multipart/form-data; boundary=y": b"--x\r\n" + part + b"--x--\r\n",
        'multipart/form-data; boundary="x': b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--\r\n",
        "multipart/form-data; boundary=x; charset=none": b"--x\r\n" + part + b"--x--\r\n",
        "multipart/form-data; charset=utf-16; boundary=x": b"--x\r\n" + part + b"--x--\r\n",
        "multipart/form-data; boundary=" + "x" * 3000: b"--x\r\n",
        "multipart/mixed; boundary=x": b"--x\r\n" + part + b"--x--\r\n",
        "application/x-www-form-urlencoded": b"prompt=%ff%00&n=%&=&&&size=" + b"a" * 9999,
        "image/png": paint_picture((64, 64), 1),
        "": b"--x",
    }
    head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a\r\nb\0../c"\r\n'
    nested = head + b"Content-Type: image/png\r\n\r\n\0\r\n--x--\r\n"
    many = (b"--x\r\n" + b"A: b\r\n" * 3000 + b"\r\n\r\n--x--", b"--x\r\n" * 20000, b"\r\n" * 50000)
    for path in (DRAW, EDIT, "/v1/videos"):
        for kind, body in [*bodies.items(), *(("multipart/form-data; boundary=x", body) for body in (nested, *many))]:
            check_answer(served.client.post(path, content=body, headers={"content-type": kind}))
        check_answer(served.client.post(path, data={f"field{k}": "x" for k in range(2000)}, files={"image": b"x"}))
        check_answer(served.client.post(path, data={"prompt": PROMPT}, files=[("image[]", b"x")] * 300))
        check_answer(served.client.post(path, files={"prompt": ("p.txt", b"a circle"), "seed": ("s", b"1")}))


def test_paths_and_ids(served: Served) -> None:
    odd = [*PATHS, "%00", "%2e%2e%2f%2e%2e%2f", "%ff%fe", "a" * 5000, "*", ";", "\u202e"]
    for name in [*odd, "video_" + "a" * 24, "image_" + "a" * 24]:
        name = name.replace("\0", "%00").replace("\\", "%5c")
        for path in (
            f"/v1/videos/{name}", f"/v1/videos/{name}/content", f"/v1/images/{name}/content/0", f"/v1/models/{name}",
            f"/v1/images/x/content/{name}", f"/v1/videos?after={name}&limit={name}&order={name}", f"/{name}",
            f"/v1/videos/x/content?variant={name}",
        ):  # fmt: skip
            assert check_answer(served.client.get(path)) in (400, 404, 422)
        for method in ("DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"):
            answer = served.client.request(method, f"/v1/videos/{name}")
            assert 400 <= answer.status_code < 500
    for name in PATHS:
        for field in ("lora", "model", "output_path", "file_path", "user"):
            check_answer(served.post(DRAW, {"prompt": PROMPT, field: name}))
        assert check_answer(served.post(DRAW, {"prompt": PROMPT, "lora": {name: 1.0}})) in (400, 422)


def test_addresses_of_other_servers_are_not_asked(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.3)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.png"
        sources = [{"image": url}, {"url": url}, {"images": [{"image_url": url}]}, {"image": "data:,x", "mask": url}]
        for values in sources:
            answer = served.post(EDIT, {"prompt": PROMPT, **values})
            assert check_answer(answer) == 400
        answer = served.post("/v1/videos", {"prompt": "a", "input_reference": url})
        assert "fetches none" in read_error(answer)["message"] or not served.service.facts.is_video
        with pytest.raises(TimeoutError):
            listener.accept()


def test_clients_that_go_while_they_send(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """A failure would mean a traceback in the log, and an alarm, for each of them."""
    port = int(served.url.rpartition(":")[2])
    for path in (DRAW, EDIT, "/v1/videos"):
        for kind in ("application/json", "multipart/form-data; boundary=x"):
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 99\r\n\r\n"
            with socket.create_connection(("127.0.0.1", port), 5) as wire:
                wire.sendall(head.encode() + b"--x\r\n")
    served.client.get("/health")
    assert not [record for record in caplog.records if record.exc_info]
    assert read_metric(served.service.metrics, "ditile_requests_refused_total", status="500") in (None, 0.0)
