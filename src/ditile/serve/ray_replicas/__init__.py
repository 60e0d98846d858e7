"""Replicas on a Ray cluster: groups of the server, replicas of Ray Serve, and their ranks as Ray's actors."""
