"""Semantics: from syntax to the checked intermediate representation."""
