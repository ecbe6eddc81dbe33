"""Kernels through which the ranks that share a model exchange data. They write to each other's memory."""
