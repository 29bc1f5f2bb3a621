"""specbench: one verifier, one decode loop and honest measurements for every speculative decoding
method."""

__version__ = "0.1.0"
