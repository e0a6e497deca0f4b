"""Prices: memory, time and the pipeline schedule, in bytes and seconds."""
