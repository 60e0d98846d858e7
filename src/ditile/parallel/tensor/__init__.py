"""Weights: what a rank keeps of each parameter."""
