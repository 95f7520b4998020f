"""The language server: what an editor asks of a .kv file while it is written.

A `Document` is a text with the compiler's analysis; each feature is a module with one function from a document (and a
place in it) to what the protocol wants; `server` connects them to an editor. Works without torch, on texts that have errors, and on
half-written ones: what cannot be known is left out.
"""
