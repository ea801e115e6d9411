"""What a schedule's transfers need, and whether all can be completed; pure."""
