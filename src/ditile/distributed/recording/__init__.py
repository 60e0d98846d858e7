"""Recorded calls: tapes of what is computed and sent, and the CUDA graphs that they are made of."""
