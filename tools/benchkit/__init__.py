"""The parts of ``tools/bench_compare.py``."""
