"""Other libraries' training loops under a plan, one thin module for each; nothing of theirs is imported before it.

accelerate      an Accelerator prepares models, optimizers and loaders by the plan
lightning       Lightning's Trainer and Fabric, and their checkpoints
peft            the plan of a base model, for its adapters
transformers    a Trainer, and what derives from it (TRL's SFTTrainer), trains by the plan
"""
