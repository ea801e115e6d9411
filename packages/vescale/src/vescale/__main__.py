"""`python -m vescale`: the command, for torchrun's `-m`."""

from .cli import main

main()
