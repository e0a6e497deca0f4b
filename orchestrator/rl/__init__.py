"""Reinforcement learning of a model on its own samples: generation and training planned together.

`job.py` is what is asked, `lengths.py` the samples' lengths as a repeated draw, `decode.py` and `generation.py` what generation costs,
`step.py` a placement of all phases on the GPUs and its timeline, `choose.py` the fastest of them, `text.py` the screen. The training half
is the planner's own plan: `choose.fastest` is handed a function that asks for it.
"""
