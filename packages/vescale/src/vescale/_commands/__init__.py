"""The subcommands of `vescale`, one module each."""
