"""What a dry run stands on: what a run on meta tensors takes, and operators that torch lacks there."""
