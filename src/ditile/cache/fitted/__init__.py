"""Fitted schedules: which steps compute for each budget, and how the others are forecast, from a few full runs."""
