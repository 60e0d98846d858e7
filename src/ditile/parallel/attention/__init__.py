"""The attention of one layer: which kernel runs, and which keys and values it sees."""
