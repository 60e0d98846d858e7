"""Methods that leave out whole calls of the model: no block is known, and a forecast takes the place of its output."""
