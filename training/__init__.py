"""Training of the two bundled text-to-image models; see README.md in this folder."""
