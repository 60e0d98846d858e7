"""Studies a family, a machine or a quality, and writes the tables that `ditile` reads."""
