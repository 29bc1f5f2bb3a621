"""Benchmarks to run by hand on a quiet machine; they print ratios measured in one run,
interleaved, and assert nothing."""
