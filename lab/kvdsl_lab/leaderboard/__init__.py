"""The leaderboard: every policy, several budgets, many tasks, one model; differences are told from chance."""
