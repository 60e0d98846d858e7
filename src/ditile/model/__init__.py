"""Knowledge of each family of transformers: its anatomy, or its lists of blocks."""
