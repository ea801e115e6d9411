"""What the suite measures and how: cases with their contenders, budgets, and the race that times them."""
