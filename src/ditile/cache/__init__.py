"""Caches: in some steps a transformer reuses or forecasts what its blocks add, and does not run them."""
