"""Replicas on a Ray cluster: an application of Ray Serve, whose ranks are Ray's actors."""
