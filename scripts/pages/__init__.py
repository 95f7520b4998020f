"""What is made in docs/, a module a page; `scripts/make_docs.py` writes it."""
