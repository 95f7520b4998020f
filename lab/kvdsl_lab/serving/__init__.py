"""Serving many requests, simulated: vLLM's own scheduler and cache manager, before a worker of which a formula says how long it takes."""
