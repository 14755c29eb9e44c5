"""Where the time of a token goes: `python -m benchmarks.stages`."""
