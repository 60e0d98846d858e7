"""The autoencoder, divided by rows over the ranks of one image."""
