"""How a rule finds its decision: cuts carried through views, parts that meet, rows that a rank owns."""
