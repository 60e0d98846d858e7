"""Derives the structure of a family of models, and proves it."""
