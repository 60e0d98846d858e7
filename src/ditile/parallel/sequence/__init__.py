"""Splits of the tokens: Ulysses and ring, which are exact, and DistriFusion, whose keys are stale."""
