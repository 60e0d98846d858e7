"""enable_cache, disable_cache, refresh_context, summary: one line that makes a pipeline do less."""
