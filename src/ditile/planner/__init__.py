"""Chooses the plan for a model, a size and a machine: counts work and bytes, predicts seconds, searches plans."""
