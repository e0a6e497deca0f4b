"""The developers' yardstick: prices published runs as they were run and says how far off: `python -m tests.validation runs=DIR_OR_CSV`."""
