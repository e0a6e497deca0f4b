"""The engines' own training loops, a short program for each, which a rank runs as it is or in a user's copy (entry=)."""
