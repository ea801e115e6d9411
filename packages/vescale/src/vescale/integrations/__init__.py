"""Other libraries' training loops under a plan, one thin module for each; nothing of theirs is imported before it.

    accelerate      an Accelerator prepares models, optimizers and loaders by the plan
    transformers    a Trainer, and what derives from it (TRL's SFTTrainer), trains by the plan
"""
