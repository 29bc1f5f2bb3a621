"""Training the learned drafters on a target's own outputs."""
