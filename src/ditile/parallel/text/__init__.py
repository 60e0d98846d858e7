"""See the files."""
