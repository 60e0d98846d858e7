"""Splits of the tokens: Ulysses, ring and gather, which are exact, and DistriFusion, whose keys are stale."""
