"""A model's own code becomes a description: built on torch's meta device, run once forward and backward there, recorded."""
