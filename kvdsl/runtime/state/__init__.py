"""The cache of one layer: its slots, their layout in memory, and how to take back the last tokens."""
