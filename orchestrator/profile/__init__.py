"""A cluster as it is measured, in place of its datasheet."""
