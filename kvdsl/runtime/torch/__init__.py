"""The torch backend, and the prompt for every backend: attention, statistics, eviction and selection in torch operations."""
