"""What a policy's `tensor` lines ask for, found from a model that reads a text: a module a statistic.

`statistics` lists them, `request` finds out what a policy asks for, `run` reads the text, `files` writes what was found.
"""
