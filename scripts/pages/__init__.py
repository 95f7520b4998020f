"""The pages of docs/ that are made from the sources, a module a page; `scripts/make_docs.py` writes them."""
