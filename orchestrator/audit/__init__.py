"""A configuration that somebody has, read into a plan: legal or not, what it would take, and what would gain most (README.md)."""
