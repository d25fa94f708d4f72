"""The parts of the load generator ``tools/load.py``."""
