"""Many cases in a row: torch's operators, random programs, and the trainings that devices are held against."""
