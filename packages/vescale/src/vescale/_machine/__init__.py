"""The machine at hand: its devices, what they take, and whether they reach each other."""
