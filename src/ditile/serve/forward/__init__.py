"""`ditile serve --forward`: only the transformer, called by a sampler elsewhere, over a socket of this machine."""
