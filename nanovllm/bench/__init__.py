"""Measuring: workloads, the account of what the hardware allows, profiles, kept results.

`bench.py` puts it together.
"""
