"""What one layer has cached: its slots, how they lie in memory, and taking the last tokens back."""
