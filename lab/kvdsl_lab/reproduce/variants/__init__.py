"""Shipped policies as the papers' experiments run them: what an experiment changes, each a file."""
