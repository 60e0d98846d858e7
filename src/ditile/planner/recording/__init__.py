"""What a pipeline gives its transformer, recorded from its configs alone: no weight is read."""
