"""The rules of the house hold in every file."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
