"""What is known of each family of transformers: its `ModelSpec`, or its lists of blocks."""
