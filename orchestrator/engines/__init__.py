"""One file an engine: what it can run, how it behaves, and the translation of a plan into its job."""
