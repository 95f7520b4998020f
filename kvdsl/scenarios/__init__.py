"""Tests written in the language: what a policy keeps, step by step, of tokens whose attention is given."""
