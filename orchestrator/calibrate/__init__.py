"""Fits the constants of the cost model to your own measured runs: `python -m orchestrator.calibrate runs=FOLDER [out=FILE]`."""
