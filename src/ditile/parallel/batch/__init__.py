"""The axis of the batch: guidance branches (cfg) and images (data), divided at the Denoise seam."""
