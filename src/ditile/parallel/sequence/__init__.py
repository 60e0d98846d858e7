"""The axis of tokens: Ulysses, ring and DistriFusion, exact and stale, behind the Attend seam."""
