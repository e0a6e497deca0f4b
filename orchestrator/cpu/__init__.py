"""What the engines lack on a machine without a GPU. Ranks on GPUs import nothing of this but `eager`, which does nothing there."""
