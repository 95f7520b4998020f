"""IR → IR: `fold` constants, then find the state `columns` that a policy needs."""
