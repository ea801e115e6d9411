"""Ranks that wait for each other: who looks (`hang`), what proves a deadlock (`deadlock`), who differs since when
(`disagreements`)."""
