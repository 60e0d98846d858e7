"""The axes of the batch: guidance branches (cfg) and images (data), divided around each call of the model."""
