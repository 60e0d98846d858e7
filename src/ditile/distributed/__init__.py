"""The processes of a run: how they start, which groups they form, and what they send each other."""
