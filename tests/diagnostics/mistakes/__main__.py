"""Writes the corpus anew."""

from tests.diagnostics.mistakes import main

main()
