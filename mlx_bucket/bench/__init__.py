"""Strategies measured in turn on the same rows, and what is told of them."""
