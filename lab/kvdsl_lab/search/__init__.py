"""`kvdsl search`: policies that nobody has written, found by changing those that somebody has.

space   which policies there are: their bounds, and one form for those that are equal
moves   from policies to others: a node, a number, a statement; two policies into one
judge   how good one is: the error of the attention's output on recorded queries, keys and values, then the next token's distribution
workers the same in several processes
store   what is known of every policy, in one SQLite file
evolve  the search itself, a sequence that a seed decides; what the store knows is not measured again
proof   finalists and seeds as language models feel them: the loss of unseen text
history what the store says of the search itself: its moves, its cheap step
report  finalists as .kv files, and what is to be said of them
run     all of it on a model: record, search, prove, report
"""
