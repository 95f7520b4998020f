"""What every shipped policy keeps and attends to, on small texts: recorded, to be compared with after a change.

A policy has four texts, of 48, 96 and 176 tokens and a chat of 72 with two prompts, and params of a size at which it evicts or selects
in them. The vectors are drawn from a seed with which nothing hangs on rounding: the same tokens stay where every input is a little
different, so that every backend has to keep them exactly.

`texts` draws what comes in, `machines` runs policies in the interpreter and on backends, `record` makes records and compares them.
"""
