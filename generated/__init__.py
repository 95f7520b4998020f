"""KV-cache policies, compiled by kvdsl."""
