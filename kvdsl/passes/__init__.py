"""Rewrites of the IR: constant folding, normal forms, and the state columns that a policy needs."""
