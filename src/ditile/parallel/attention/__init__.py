"""The Attend seam: which kernel, over which keys and values."""
