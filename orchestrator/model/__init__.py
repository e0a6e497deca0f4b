"""What is trained: the architecture, its layers as weights and operations, and what decides convergence."""
