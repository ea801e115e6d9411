"""Parts of `testing`: worlds of worker processes, the single-device oracle, random programs."""
