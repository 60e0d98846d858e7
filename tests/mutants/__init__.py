"""Faults that the tests must find: each is put into a copy of the package, and some test has to fail."""
