"""Syntax: from text to dataclasses with spans."""
