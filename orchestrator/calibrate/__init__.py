"""Fits the constants of the cost model to measured runs: `python -m orchestrator.calibrate runs=DIR_OR_CSV [out=FILE]`."""
