"""Weights in files: folders of safetensors, and single files under other names, read tensor by tensor."""
