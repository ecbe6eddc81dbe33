"""Mixture of experts: routing, sorting of (token, expert) pairs, and the products of experts."""
