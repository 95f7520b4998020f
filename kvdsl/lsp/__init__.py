"""The language server, which answers an editor's requests about .kv files.

A `Document` is a text with the compiler's analysis. Each feature is a module with one function from a document (and a place in it) to
the protocol's result; `server` connects them to an editor. The server needs no torch, and handles texts with errors and unfinished
ones: it leaves out what it cannot determine.
"""
