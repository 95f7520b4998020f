"""Rewrite the corpus."""

from tests.diagnostics.mistakes import main

main()
