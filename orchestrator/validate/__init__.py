"""Prices published runs as they were run and says how far off: `python -m orchestrator.validate runs=DIR_OR_CSV`."""
