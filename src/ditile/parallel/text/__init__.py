"""The text encoders: on one rank of an image, or with their layers split."""
