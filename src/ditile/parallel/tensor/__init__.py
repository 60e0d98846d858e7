"""The split of the weights: tensor parallelism, in which a rank keeps a share of each parameter."""
