"""The rules of the house hold in every file, and each of them can fail."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import ditile
from tests.house import rules
from tests.house.rules import Source

ROOT = Path(__file__).parents[2]
HERE = "tests/house/"
Rule = Callable[[Source], Iterator[str]]
TreeRule = Callable[[Sequence[Source]], Iterator[str]]

OF_PACKAGE: list[Rule] = [
    rules.globals_, rules.environment, rules.swallowed, rules.patched, rules.unsafe, rules.directions,
]  # fmt: skip
OF_PYTHON: list[Rule] = [rules.sizes, rules.vague]
OF_TEXT: list[Rule] = [rules.unfinished, rules.machine_paths]
OF_TREE: list[TreeRule] = [
    rules.root_entries, rules.folders, rules.twins, rules.format_skips, rules.lonely, rules.density,
    rules.rooms, rules.first_words,
]  # fmt: skip
TEXTS = {".py", ".typed", ".md", ".toml", ".txt", ".json", ".sh", ".yml", ".yaml", ""}

WRONG = {
    rules.sizes: ["async def f():\n    '''doc'''\n" + "    x = 1\n" * 50],
    rules.globals_: ["def f():\n    global x\n    x = 1"],
    rules.environment: ["import os\nos.environ['A']", "from os import environ", "import os\nos.getenv('A')"],
    rules.swallowed: [
        "try:\n    f()\nexcept:\n    g()",
        "with contextlib.suppress(Exception):\n    f()",
    ],
    rules.patched: [
        "type(block).forward = mine",
        "block.__class__.forward = mine",
        "setattr(cls, 'forward', mine)",
    ],
    rules.unsafe: [
        "from pickle import loads",
        "torch.load('x')",
        "f(trust_remote_code=wanted)",
        "f(use_safetensors=False)",
    ],
    rules.directions: [
        "from ditile_lab.bench import rows",
        "import ditile.parallel.sequence.ring",
        "from ..cache import config",
        "def f():\n    from ditile.runner.runner import Runner",
    ],
    rules.vague: ["class CacheManager: ...", "class BaseSplit: ..."],
    rules.unfinished: ["x = 1  # TO" + "DO later", "# FIX" + "ME"],
    rules.machine_paths: ["open('/" + "tmp/x')", "see /" + "root/notes", "/" + "home/ann/models"],
}


def package(**files: str) -> list[Source]:
    """Files of a package by their names, `__` for a slash."""
    return [Source(f"src/ditile/{name.replace('__', '/')}.py", text) for name, text in files.items()]


LONG = "def exchange_heads(): ..."
PLAIN = "x = 1\n" * 10
DOCUMENTED = 'def exchange_heads():\n    """{}"""\n'
WRONG_TREES: dict[TreeRule, list[list[Source]]] = {
    rules.root_entries: [package(**{f"m{k}": "" for k in range(15)})],
    rules.folders: [package(**{f"cache__m{k}": "" for k in range(17)})],
    rules.twins: [
        package(a="class Job: ...", b="def f():\n    class Job: ..."),
    ],
    rules.format_skips: [package(a="x = 1  # fmt: skip\n" * 21)],
    rules.lonely: [
        package(a=LONG, b="from ditile.a import x"),
    ],
    rules.density: [
        package(a="# A reason.\n" + PLAIN + "y = 1 if x else 2\n"),
        package(a="# A reason.\n" + PLAIN + "a, b = 1, 2\n"),
        package(a="# A reason.\n" + PLAIN + "a = [x for x in y]\n"),
        package(a=PLAIN),
    ],
    rules.rooms: [package(plan__flags__a=PLAIN * 1000), package(attic__a=PLAIN), package(a=PLAIN * 20)],
    rules.first_words: [package(a=DOCUMENTED.format("Whether it fits.")), package(a=DOCUMENTED.format("The tokens."))],
}


def cases(samples: dict[Any, list[Any]]) -> list[object]:
    named = [(rule, sample, f"{rule.__name__}-{k}") for rule in samples for k, sample in enumerate(samples[rule])]
    return [pytest.param(rule, sample, id=name) for rule, sample, name in named]


def tracked() -> list[Source]:
    """Every text file that git knows, or would; all files where there is no git."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = [ROOT / name for name in names if name and Path(name).suffix in TEXTS]
    return [Source(p.relative_to(ROOT).as_posix(), p.read_text("utf-8")) for p in paths if p.is_file()]


FILES = tracked()


@pytest.mark.parametrize("rule", OF_PACKAGE, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule) -> None:
    assert_kept(rule, [s for s in FILES if s.path.startswith((rules.PACKAGE, rules.LAB)) and s.path.endswith(".py")])


@pytest.mark.parametrize("rule", OF_PYTHON, ids=lambda rule: rule.__name__)
def test_all_python_keeps(rule: Rule) -> None:
    assert_kept(rule, [s for s in FILES if s.path.endswith(".py")])


@pytest.mark.parametrize("rule", OF_TEXT, ids=lambda rule: rule.__name__)
def test_all_text_keeps(rule: Rule) -> None:
    assert_kept(rule, [s for s in FILES if not s.path.startswith(HERE) and not s.path.endswith("tokenizer.json")])


@pytest.mark.parametrize("rule", OF_TREE, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: TreeRule) -> None:
    assert list(rule(FILES)) == [], rule.__doc__


@pytest.mark.parametrize(("rule", "sources"), cases(WRONG_TREES))
def test_a_rule_of_the_tree_finds_what_breaks_it(rule: TreeRule, sources: list[Source]) -> None:
    assert list(rule(sources))


@pytest.mark.parametrize(("rule", "text"), cases(WRONG))
def test_a_rule_finds_what_breaks_it(rule: Rule, text: str) -> None:
    assert list(rule(Source("src/ditile/model/sample.py", text)))


def test_every_rule_has_a_sample_that_breaks_it() -> None:
    assert set(WRONG) == {*OF_PACKAGE, *OF_PYTHON, *OF_TEXT} and set(WRONG_TREES) == set(OF_TREE)
    assert list(rules.vague(Source("src/ditile/utils.py", "")))


def test_the_public_names_are_these_and_sorted() -> None:
    names = [
        "BasicCacheConfig", "BlockAdapter", "CalibratorConfig", "DBCacheConfig", "DBPruneConfig",
        "DMDCalibratorConfig", "DitileError", "EasyCacheConfig", "FittedScheduleConfig", "FoCaCalibratorConfig",
        "ForwardPattern", "GuidanceGateConfig", "IdleCacheWarning", "JoinError", "LoadError", "MagCacheConfig",
        "ModelError", "ParallelismBackend", "ParallelismConfig", "ParamsModifier", "PatchFunctor",
        "Pattern_0", "Pattern_1", "Pattern_2", "Pattern_3", "Pattern_4", "Pattern_5", "Plan", "PlanError",
        "QuantizeConfig", "RankError", "Report", "Runner", "Schedule", "SeaCacheConfig", "SpectrumConfig",
        "StateError", "StepWatch", "StoppedError", "TaylorSeerCalibratorConfig",
        "__version__", "defaults", "disable_cache", "enable_cache", "enable_parallelism", "launch", "load",
        "load_attn_backend_config", "load_cache_config", "load_configs", "load_lora", "load_parallelism_config",
        "load_quantize_config", "parallelize", "plan_for", "quantize", "refresh_context", "set_compile_configs",
        "steps_mask", "strify", "summary", "supported_pipelines",
    ]  # fmt: skip
    assert ditile.__all__ == sorted(names) == dir(ditile)
    for name in names:
        assert getattr(ditile, name) is not None


def test_the_readme_is_short() -> None:
    readme = next(source for source in FILES if source.path == "README.md")
    assert len(readme.text.splitlines()) <= 120


def assert_kept(rule: Rule, sources: list[Source]) -> None:
    """Fails with every place that breaks the rule."""
    broken = [f"{source.path}: {what}" for source in sources for what in rule(source)]
    assert sources and not broken, "\n".join([rule.__doc__ or "", *broken])
