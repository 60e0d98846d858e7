"""After the loop: the autoencoder, divided by rows over the ranks of one image."""
