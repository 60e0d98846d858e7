"""`ditile serve --forward`: the transformer alone, called by a sampler elsewhere, over a socket of this machine."""
