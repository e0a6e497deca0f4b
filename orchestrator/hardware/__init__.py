"""What it runs on: GPUs, network levels, and the time of one transfer."""
