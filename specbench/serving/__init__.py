"""Serving: requests that arrive by chance are decoded together in the same loop, and what each saw
is measured against the arrival rate."""
