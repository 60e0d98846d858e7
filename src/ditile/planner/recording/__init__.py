"""Records a pipeline's inputs to its transformer from configs only: no weight is read."""
