"""The strategies: a folder for each kind of axis, and one each for attention, text encoders and autoencoder."""
