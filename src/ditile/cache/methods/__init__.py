"""The methods of caches, a file each: what a method compares or knows, and what it takes for a step it leaves out."""
