"""Where strategies meet a model: hooks on its blocks, attention and outputs, for the length of a call."""
