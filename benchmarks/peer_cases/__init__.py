"""The cases of `peers.py`: training steps, checkpoints and context parallelism, torch's beside ours."""
