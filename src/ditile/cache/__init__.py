"""Strategies that divide steps: some are computed whole, of others only a part."""
