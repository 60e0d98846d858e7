"""Recorded steps: which calls of a model are recorded, and when a recording may be played."""
