"""Replicas on a Ray cluster: their ranks are Ray's actors, which the server watches as it does its own processes."""
