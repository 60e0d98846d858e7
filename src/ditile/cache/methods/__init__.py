"""The methods of caches, one file each: what a method compares or knows, and how it replaces a step that it leaves
out."""
