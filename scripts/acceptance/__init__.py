"""The acceptance criteria of the issues: `issue_N.py` registers those of issue N."""
