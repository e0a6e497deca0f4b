"""How it can be parallelised: meshes, strategies, what an engine allows, and the tree over them."""
