"""Which plan for this model, this size, this machine: cost, price, search."""
