"""Derives what a family of models needs, and proves it."""
