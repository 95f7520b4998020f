"""Measuring quality: what a policy costs in perplexity, in fidelity to the full cache's text, and in recall."""
