"""What only makes steps faster: each thing in its file, each with its switch in `policy.py`.

The rest of the engine knows `paths.py` alone. With all of it off, the engine computes the same tokens.
"""
