"""Drafters with trained weights: their modules, and the checkpoint formats that they come in."""
