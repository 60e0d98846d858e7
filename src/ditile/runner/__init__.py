"""The calls of users: load a pipeline, divide it by a plan, quantize it, cache it, and run it."""
