"""The autoencoder, with its rows divided over the ranks of one image."""
