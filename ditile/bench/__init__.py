"""Scenes with captions, and the checker that says whether a picture shows its caption."""
