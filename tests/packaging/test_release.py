"""What a release brings beside the package: files for containers, pages, and names that other programs look for."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

import ditile
from ditile.cli.main import build_parser
from ditile.plan.extras import EXTRAS
from ditile.serve.options import ServeOptions
from tests.packaging.environments import ROOT, SOURCES

DEPLOY = ROOT / "examples" / "deploy"


def read_documents(name: str) -> list[dict[str, Any]]:
    """Return the documents of a file for containers, where `${NAME:-value}` is the value."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / name).read_text("utf-8"))
    return list(yaml.safe_load_all(text))


def test_the_compose_file_builds_the_dockerfile_and_asks_for_keys() -> None:
    (document,) = read_documents("compose.yaml")
    service = document["services"]["ditile"]
    arguments = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    assert set(service["build"]["args"]) <= set(arguments)
    assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
    parsed = build_parser().parse_args(service["command"])
    assert parsed.command == "serve" and parsed.api_key == "/run/secrets/api-key"
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "/health" in service["healthcheck"]["test"][-1]
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")


def test_the_manifest_of_kubernetes_starts_a_server_behind_its_own_probes() -> None:
    claim, deployment, service = read_documents("kubernetes.yaml")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    parsed = build_parser().parse_args(container["args"])
    (port,) = container["ports"]
    assert parsed.command == "serve" and ServeOptions().port == port["containerPort"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", container["image"])
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == pod["metadata"]["labels"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert mounted == volumes.keys()
    assert volumes["state"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_site_has_each_page_of_the_docs() -> None:
    menu = re.findall(r"^ +- (?:\w+: )?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages == set(menu) - {"index.md", "changelog.md", "contributing.md"}


@pytest.mark.nightly
def test_every_link_of_the_site_leads_somewhere(tmp_path: Path) -> None:
    """Of every page of `make site`: to files of the site, and to what they have the id of."""
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: path.read_text("utf-8") for path in tmp_path.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 60
    ids = {path: set(re.findall(r'\bid="?([^"\s>]+)', text)) for path, text in pages.items()}
    lost = set()
    for page, text in pages.items():
        for link in re.findall(r'(?:href|src)="?([^"\s>]+)', text):
            path, _, anchor = unescape(unquote(link)).partition("#")
            if ":" in path or path.startswith("//"):
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in ids.get(target, {anchor})):
                lost.add(f"{page.relative_to(tmp_path)}: {link}")
    assert not lost


@pytest.mark.nightly
def test_a_release_is_built_checked_and_installed() -> None:
    done = subprocess.run(["scripts/dist"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    made = {path.name for path in (ROOT / "build" / "dist").iterdir()}
    version = ditile.__version__
    assert made == {f"ditile-{version}.tar.gz", f"ditile-{version}-py3-none-any.whl", "ditile.cdx.json"}
    parts = json.loads((ROOT / "build" / "dist" / "ditile.cdx.json").read_text("utf-8"))["components"]
    assert {"torch", "diffusers", "safetensors"} <= {part["name"] for part in parts}


def read_dockerfile() -> list[list[str]]:
    """The words of the instructions."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.nightly
def test_the_dockerfile_runs_as_a_user_and_opens_nothing() -> None:
    instructions = read_dockerfile()
    steps = [words[0] for words in instructions]
    assert ["USER", "1000"] in instructions and steps.index("USER") > len(steps) - 1 - steps[::-1].index("RUN")
    assert ["ENTRYPOINT", "[ditile]"] in instructions
    assert not any("0.0.0.0" in word for words in instructions for word in words)
    arguments = dict(words[1].split("=", 1) for words in instructions if words[0] == "ARG")
    assert set(arguments["EXTRAS"].split(",")) <= EXTRAS.keys()


@pytest.mark.nightly
def test_the_steps_of_the_dockerfile(tmp_path: Path) -> None:
    """Its installation, in a folder with what it copies and in an environment in place of the image's Python."""
    context, environment = tmp_path / "context", tmp_path / "environment"
    context.mkdir()
    for name in (*SOURCES, "constraints.txt"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, context / name)
    venv.create(environment, symlinks=True, with_pip=True)
    arguments = dict(words[1].split("=", 1) for words in read_dockerfile() if words[0] == "ARG")
    # The index of torch's builds for CPUs; any other one of the machine's has them too.
    variables = {"PATH": f"{environment / 'bin'}:/usr/bin:/bin", "EXTRAS": arguments["EXTRAS"]}
    line = next(line for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines() if line.startswith("RUN python"))
    command = line.removeprefix("RUN ").replace('--extra-index-url "${TORCH_INDEX}"', "")
    done = subprocess.run(["sh", "-c", command], cwd=context, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    entry = subprocess.run([environment / "bin" / "ditile", "--help"], capture_output=True, text=True)
    assert entry.returncode == 0 and "serve" in entry.stdout
