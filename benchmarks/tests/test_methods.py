"""The settings that methods are compared by."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.methods import choose_method_lines
from ditile_lab.quality.options import ORIGINAL, EvaluateOptions


def test_every_setting_is_a_cache() -> None:
    """A failure means a comparison that ends at the setting that cannot be read, after minutes."""
    options = EvaluateOptions(model="shapes-flux")
    lines = choose_method_lines(options.build_generate_options())
    settings = replace(options, plans=ORIGINAL.plan, caches="; ".join(lines)).candidate_settings
    assert len(settings) == len(lines) > 15
    for setting in settings:
        assert setting.plan == ORIGINAL.plan
        assert setting.cache_arguments["cache_config"] is not None
    assert "gating" in lines.values()
