"""A ditile server by the official client of OpenAI: images, edits, streams, videos and errors.

    pip install openai
    ditile serve --model shapes-flux --pipefusion 2          # generates images
    python examples/openai_client.py
    ditile serve --model shapes-wan --ulysses 2 --port 8001  # generates videos
    python examples/openai_client.py --address http://127.0.0.1:8001

The key is that of DITILE_API_KEY, if the server asks for one.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
from pathlib import Path
from typing import Any

import openai

PROMPT = "a large red circle on the left on a gray background"
VIDEO_PROMPT = "a large red circle moves from left to right on a gray background"


def generate_image(client: openai.OpenAI, folder: Path) -> Path:
    """An image, with fields that OpenAI's own models do not have in `extra_body`."""
    answer = client.images.generate(prompt=PROMPT, size="128x128", extra_body={"seed": 7, "num_inference_steps": 8})
    path = write_image(folder / "image.png", answer.data[0].b64_json)
    facts: Any = answer.model_extra
    print(f"{path}: seed {facts['seed']}, {facts['inference_time_s']:.2f} s of work")
    return path


def edit_image(client: openai.OpenAI, folder: Path, image: Path) -> None:
    """The same image with another form in it. With `mask` only where that is transparent."""
    with image.open("rb") as file:
        answer = client.images.edit(
            image=file,
            prompt="a large blue square on the left on a gray background",
            extra_body={"seed": 7, "strength": 0.8},
        )
    print(f"{write_image(folder / 'edit.png', answer.data[0].b64_json)}: edited")


def stream_image(client: openai.OpenAI, folder: Path) -> None:
    """Previews of the running image, and then the image. A client that leaves the loop ends the work."""
    events = client.images.generate(prompt=PROMPT, stream=True, partial_images=2, extra_body={"seed": 7})
    for event in events:
        name = "streamed.png"
        if event.type == "image_generation.partial_image":
            name = f"partial-{event.partial_image_index}.png"
        print(f"{write_image(folder / name, event.b64_json)}: {event.type}")


def generate_video(client: openai.OpenAI, folder: Path) -> None:
    """A job that is asked for, watched, fetched, remixed with another prompt, and deleted."""
    video = client.videos.create(prompt=VIDEO_PROMPT, seconds="1", extra_body={"seed": 7})
    print(f"{video.id}: {video.status}, {video.seconds} s of {video.size}")
    video = client.videos.poll(video.id)
    if video.status == "failed":
        raise SystemExit(f"{video.id}: {video.error.message}")
    for variant, name in (("video", "video.mp4"), ("thumbnail", "video.png"), ("spritesheet", "spritesheet.png")):
        client.videos.download_content(video.id, variant=variant).write_to_file(folder / name)
        print(f"{folder / name}: {variant}")
    remix = client.videos.remix(video.id, prompt="a large blue square moves from left to right on a gray background")
    print(f"{remix.id}: cancelled by DELETE: {client.videos.delete(remix.id).deleted}")


def show_errors(client: openai.OpenAI) -> None:
    """Errors are one line that says what would work."""
    for values in ({"prompt": PROMPT, "size": "100x100"}, {"prompt": PROMPT, "extra_body": {"lora": "style"}}):
        try:
            client.images.generate(**values)
        except openai.UnprocessableEntityError as error:
            print(f"{error.status_code} {error.code}: {error.body['message']}")


def write_image(path: Path, encoded: str) -> Path:
    """Writes base64 as a file."""
    path.write_bytes(base64.b64decode(encoded))
    return path


def main() -> None:
    """Does all that the served model can."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the images and videos")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # The client wants a key also where the server asks for none.
    key = os.environ.get("DITILE_API_KEY") or "none"
    client = openai.OpenAI(base_url=f"{arguments.address}/v1", api_key=key)
    try:
        model = client.models.list().data[0].id
    except openai.APIConnectionError:
        sys.exit(f"openai_client.py: no server answers at {arguments.address}; start ditile serve, or give --address")
    print(f"{arguments.address} serves {model}")
    try:
        image = generate_image(client, arguments.out)
    except openai.UnprocessableEntityError as error:
        if error.code != "wrong_kind_of_model":
            raise
        generate_video(client, arguments.out)
        return
    edit_image(client, arguments.out, image)
    stream_image(client, arguments.out)
    show_errors(client)


if __name__ == "__main__":
    try:
        main()
    except openai.OpenAIError as error:
        sys.exit(f"openai_client.py: {error}")
