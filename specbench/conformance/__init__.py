"""The cases that every method must pass, on tiny models, and the broken methods and loops that they
must catch."""
