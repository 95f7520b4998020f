"""The pictures of the documents, each taken of the real thing: `make pictures`, or `python -m scripts.pictures NAME…`.

What runs in a terminal is drawn as SVG from the terminal's screen; pages are taken by Chromium. Pictures are committed, so that the
documents can be built, and read on a code host, without what it takes to make them.
"""
