"""Knowledge of each family of transformers: its `ModelSpec`, or its lists of blocks."""
