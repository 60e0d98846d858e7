"""The text encoders: on one rank of an image, or their layers shared out."""
